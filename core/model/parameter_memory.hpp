// The parameters of a model and the memory that their values are in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/device_memory.hpp"
#include "plan/plan.hpp"
#include "zr/abi/base.h"

namespace zr::host::model {

/// Training thread only, except the callbacks of Uses.
class ParameterMemory {
 public:
  virtual ~ParameterMemory() = default;
  virtual const std::vector<plan::Parameter>& parameters() const = 0;
  /// Copies the parameter's current value as fp32 to out[count]. Not for a deferred model.
  virtual void read(uint32_t param, float* out) = 0;
  /// Number of operators that must run to construct a deferred model; 0 for a model that is not deferred.
  virtual std::size_t deferred() const = 0;
  /// Staging memory for one parameter in fp32. store() takes its values over, load() returns them; both are collective.
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
  virtual DeviceMemory* memory() = 0;
  /// From now on the memory that bind(), attach() and the gradient functions get is not host memory, but memory of the
  /// device, from memory(): there are no copies of weights and gradients in host memory. Before the first bind().
  virtual void keep_on_device() = 0;
  /// Call after the memory of bound parameters has changed, also of frozen ones if `frozen_too`: copies it to the
  /// device that the model is on. Without effect for a model on the CPU.
  virtual void weights_changed(bool frozen_too) = 0;
  /// Call after the values of these parameters have changed: backward through an operator that saved one of them before
  /// is an error then, as after an in-place operator.
  virtual void values_replaced(const std::vector<uint32_t>& params) = 0;
  /// Runs fn(begin, end) over [0, n) on several threads, in ranges of at least `grain`. Empty: on this thread.
  using ParallelFor = std::function<void(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn)>;
  /// Sets the threads for copies between host memory and the device.
  virtual void use_threads(ParallelFor parallel_for) = 0;
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
  virtual std::vector<uint32_t> may_be_written_untracked() = 0;
  /// Throws UserError naming a bound parameter whose data the program replaced without the engine.
  virtual void check_bindings() = 0;
  /// Throws UserError naming `call` and a parameter with an open zr::gather scope.
  virtual void check_scopes(const std::string& call) = 0;
  /// Throws UserError naming `call` if this parameter has an open zr::gather scope.
  virtual void check_scope(uint32_t param, const std::string& call) = 0;
  /// Allocates memory for a parameter that return_parameters() will use; throws if the allocation fails. `other`:
  /// returns memory of the given type that the caller must fill; otherwise return_parameters() copies the bound memory,
  /// and the result is null.
  virtual void* reserve_parameter(uint32_t param, zr_dtype dtype, bool other) = 0;
  virtual void cancel_reserved_parameters() = 0;  // frees the reserved memory
  /// Gives bound parameters their own memory again, with the current values. Unbound parameters without reserved memory
  /// become unusable.
  virtual void return_parameters() = 0;
};

}  // namespace zr::host::model
