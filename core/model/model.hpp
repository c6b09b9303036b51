// The interface of a model that the engine uses, without libtorch: parameters, their memory, and their gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/device_memory.hpp"
#include "plan/plan.hpp"
#include "zr/abi/strategy.h"

namespace zr::host::model {

/// A named buffer of the model (running statistics): raw bytes, valid as long as the model.
struct ModelBuffer {
  std::string name;
  void* data;
  int64_t bytes;
  std::string dtype;  // as safetensors names it: "F32"
  std::vector<int64_t> shape;
};

/// Memory of a device other than the CPU that the model's library holds, in bytes.
struct DeviceBytes {
  int64_t held = 0, peak = 0;  // peak: since Model::forget_peak()
  int64_t of_engines = 0;      // the part of `held` that engines of this process allocated with DeviceMemory
  bool counted = false;        // the library counts this memory; otherwise all are 0
};

/// Implemented on libtorch (torch_model.hpp) and by tests. Training thread only, except the gradient calls.
class Model {
 public:
  virtual ~Model() = default;
  virtual const std::vector<plan::Parameter>& parameters() const = 0;
  /// In the model's order, without empty ones. If the model is on a device, `data` is host memory with a copy of the
  /// buffer's current value: after changes to it, call write_buffers().
  virtual std::vector<ModelBuffer> buffers() = 0;
  /// Writes the memory that the last buffers() returned back to the buffers. Without effect for a model on the CPU.
  virtual void write_buffers() {}
  /// The buffers without elements: they have no values, but weights of other programs may list them. `data` is null.
  virtual std::vector<ModelBuffer> empty_buffers() const { return {}; }
  /// Copies the parameter's current value as fp32 to out[count]. Not for a deferred model.
  virtual void read(uint32_t param, float* out) = 0;
  /// Number of operators that must run to construct a deferred model; 0 for a model that is not deferred.
  virtual std::size_t deferred() const = 0;
  /// Staging memory for one parameter in fp32. store() takes its values over, load() returns them; both are
  /// collective.
  struct ConstructMemory {
    float* staging;
    std::function<void(uint32_t param, const float* values)> store;
    std::function<void(uint32_t param, float* values)> load;
    std::function<void(int64_t bytes)> account;  // allocated, or (negative) freed more memory
    // Gives all ranks the bytes of the rank that runs the operators; collective.
    std::function<void(void* data, int64_t bytes)> broadcast;
  };
  /// Constructs a deferred model, its buffers and its other tensors. If `runs_operators` is false, skips the operators:
  /// store() and broadcast() get the values from another rank. Collective.
  virtual void construct(const ConstructMemory& memory, bool runs_operators) = 0;
  /// From now on the parameter's data is `memory` (count elements, row-major, of `dtype`), which must outlive its use
  /// by the model.
  /// If the model is on a device, the parameter has memory there, and `memory` is host memory: see weights_changed()
  /// and written(); but see keep_on_device() too.
  virtual void bind(uint32_t param, void* memory, zr_dtype dtype) = 0;
  /// The memory of the device that the model is on; null for the CPU. It lives as long as the model.
  virtual DeviceMemory* memory() { return nullptr; }
  /// From now on the memory that bind(), attach() and the gradient functions get is not host memory, but memory of the
  /// device, from memory(): there are no copies of weights and gradients in host memory. Before the first bind().
  virtual void keep_on_device() {}
  /// Call after the memory of bound parameters has changed, also of frozen ones if `frozen_too`: copies it to the
  /// device that the model is on. Without effect for a model on the CPU.
  virtual void weights_changed(bool /*frozen_too*/) {}
  /// Call after the values of these parameters have changed: backward through an operator that saved one of them before
  /// is an error then, as after an in-place operator.
  virtual void values_replaced(const std::vector<uint32_t>& /*params*/) {}
  /// Runs fn(begin, end) over [0, n) on several threads, in ranges of at least `grain`. Empty: on this thread.
  using ParallelFor = std::function<void(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn)>;
  /// Sets the threads for copies between host memory and the device.
  virtual void use_threads(ParallelFor /*parallel_for*/) {}  // NOLINT: overrides take over the function
  /// Callbacks for operators on parameters without their own memory: begin() before an operator uses them, end() after,
  /// with written[i] true if it wrote to params[i]. Any thread, several at once. `phase`: ZR_EXPORT_PHASE if the
  /// program requested their memory (zr::gather), ZR_EVAL for an operator without gradients, else ZR_FORWARD.
  struct Uses {
    std::function<void(const uint32_t* params, uint32_t n, uint32_t phase)> begin;
    std::function<void(const uint32_t* params, const bool* written, uint32_t n)> end;
    /// This rank wrote to its own copy of a shared parameter, `full`; the engine takes the values over. Collective.
    std::function<void(uint32_t param, const void* full)> wrote;
    /// A zr::gather scope over these parameters (bound ones too) begins, or ends without an exception. Collective;
    /// training thread.
    std::function<void(const uint32_t* params, uint32_t n, bool begins)> scope;
  };
  virtual void on_use(Uses uses) = 0;  // replaces the previous callbacks
  /// From now on the parameter's data is `memory`, which all ranks of this node read in place. Operators never write to
  /// it.
  virtual void bind_shared(uint32_t param, const void* memory, zr_dtype dtype) = 0;
  /// From now on the parameter has memory only if attach() gives it some, between begin() and end() of a use.
  virtual void unbind(uint32_t param, zr_dtype dtype) = 0;
  /// Attaches `memory`, as in bind(); null detaches it.
  virtual void attach(uint32_t param, void* memory) = 0;
  /// Parameters bound by bind() that were written to in place since the last call. If the model is on a device, their
  /// values are copied to the bound memory.
  virtual std::vector<uint32_t> written() = 0;
  /// Bound parameters that tensors from before bind() may write to, which written() does not see.
  virtual std::vector<uint32_t> may_be_written_untracked() { return {}; }
  /// Throws UserError naming a bound parameter whose data the program replaced without the engine.
  virtual void check_bindings() = 0;
  /// Throws UserError naming `call` and a parameter with an open zr::gather scope.
  virtual void check_scopes(const std::string& call) = 0;
  /// The same check for one parameter.
  virtual void check_scope(uint32_t param, const std::string& call) = 0;
  /// Allocates memory for a parameter that return_parameters() will use; throws if the allocation fails. `other`:
  /// returns memory of the given type that the caller must fill; otherwise return_parameters() copies the bound memory,
  /// and the result is null.
  virtual void* reserve_parameter(uint32_t, zr_dtype, bool /*other*/) { return nullptr; }
  virtual void cancel_reserved_parameters() {}  // frees the reserved memory
  /// Converts the floating-point buffers of train.cast_buffers to that type.
  virtual void convert_buffers(zr_dtype) {}
  /// Gives bound parameters their own memory again, with the current values. Unbound parameters without reserved memory
  /// become unusable.
  virtual void return_parameters() = 0;

  /// Called on an autograd thread, one at a time, when a parameter's gradient of this backward has arrived; [use].
  using Arrived = std::function<void(uint32_t param)>;
  virtual void on_gradient(Arrived arrived) = 0;  // replaces the previous callback; empty: none
  /// If the model is on a device and its gradients are delivered in host memory, they arrive when they have been copied
  /// there, and computed() is called before, on an autograd thread, when autograd has enqueued the computation of one.
  /// Replaces the previous callback.
  virtual void on_gradient_computed(std::function<void(uint32_t)> /*computed*/) {}  // NOLINT: overrides take it over
  /// Whether gradients of a model on a device arrive on a thread of the model, while autograd continues; otherwise in
  /// an order and at times that are the same on all ranks. Between backwards.
  virtual void deliver_on_thread(bool /*on*/) {}
  /// Waits until the gradients of this backward have arrived. Training thread, after backward.
  virtual void finish_gradients() {}
  /// Drops gradients that have been computed and not arrived.
  virtual void drop_computed_gradients() {}
  /// The gradient that arrived, until it is dropped; without data unless it is fp32 and contiguous in host memory.
  virtual zr_view gradient(uint32_t /*param*/) { return {}; }
  /// Copies elements [first, first + dst.count) of the gradient that arrived into dst, rounding to its dtype.
  virtual void copy_gradient(uint32_t param, int64_t first, const zr_view& dst) = 0;
  /// Adds these elements to dst, in fp32, and rounds the results to its dtype.
  virtual void add_gradient(uint32_t param, int64_t first, const zr_view& dst) = 0;
  /// Frees the gradient that arrived.
  virtual void drop_gradient(uint32_t param) = 0;
  /// `hidden`: sets .grad() of all trained parameters to a placeholder whose use throws an error with the remedy;
  /// otherwise clears it.
  virtual void hide_gradients(bool hidden) = 0;

  /// Memory of the model's library other than parameters: activations, gradients in progress, temporaries, batches.
  /// Counted for the process since the first model was made. [any]
  struct Temporaries {
    int64_t held = 0, peak = 0;  // bytes; peak: since forget_peak()
  };
  virtual Temporaries temporaries() const { return {}; }
  virtual DeviceBytes device_memory() const { return {}; }  // not counted for a model on the CPU
  virtual void forget_peak() {}                             // sets the peaks to the bytes held now
  /// Before an allocation that would exceed `bytes`, calls over(requested) on the allocating thread; if it returns, the
  /// allocation is made. Replaces the previous limit; an empty function removes it.
  virtual void limit_temporaries(int64_t, const std::function<void(int64_t requested)>&) {}

  /// Store for tensors that autograd saves for backward, as records of bytes. One call at a time, any thread.
  struct OffloadCallbacks {
    int64_t min_bytes = 0;                                               // smaller storages are not offloaded
    std::function<uint64_t(const void* data, int64_t bytes)> put;        // copies data; returns the record's number
    std::function<void(uint64_t record, void* to)> get;                  // may be called repeatedly
    std::function<void(const std::vector<uint64_t>& records)> prefetch;  // needed next, in this order
    std::function<void(uint64_t record)> drop;                           // no longer needed; must not throw
  };
  /// From now on, offloads the tensors that operators of this thread save; their memory is freed when nothing else uses
  /// it. They are restored bit-identically. Replaces the previous callbacks. Without put(), autograd keeps all saved
  /// tensors itself, and graphs recorded before can no longer be used.
  virtual void offload_saved_tensors(OffloadCallbacks) {}  // NOLINT: overrides take over the callbacks

  /// Reseeds the random generators that dropout draws from.
  virtual void seed(uint64_t seed) = 0;
};

}  // namespace zr::host::model
