// What the step needs of a model, without a word of libtorch: parameters, their memory, and gradients as they appear.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/plan.hpp"
#include "zr/abi/strategy.h"

namespace zr::host {

/// A named buffer of the model (running statistics): raw bytes, alive as long as the model.
struct ModelBuffer {
  std::string name;
  void* data;
  int64_t bytes;
  std::string dtype;  // as safetensors names it: "F32"
  std::vector<int64_t> shape;
};

/// Implemented once over libtorch (torch_model.hpp) and once by tests. Training thread only, but for the gradient
/// calls.
class Model {
 public:
  virtual ~Model() = default;
  virtual const std::vector<Parameter>& parameters() const = 0;
  virtual std::vector<ModelBuffer> buffers() = 0;  // in the model's order
  /// The parameter's present value as fp32: out[count]. Not of a deferred model.
  virtual void read(uint32_t param, float* out) = 0;
  /// Operators that a deferred model's construction still has to run; 0 for a model that is there.
  virtual std::size_t deferred() const = 0;
  /// Room for one parameter in fp32, whose values store() takes over and load() gives back. Collective, as both.
  struct ConstructMemory {
    float* staging;
    std::function<void(uint32_t param, const float* values)> store;
    std::function<void(uint32_t param, float* values)> load;
    std::function<void(int64_t bytes)> account;  // more room was taken, or (negative) given back
  };
  /// Constructs a deferred model, its buffers too; where `computes` is false the operators are left out, and store()
  /// brings another rank's values.
  virtual void construct(const ConstructMemory& memory, bool computes) = 0;
  /// From now on the parameter's data is `memory` (count elements, row-major, of `dtype`), which outlives the model's
  /// use of it.
  virtual void bind(uint32_t param, void* memory, zr_dtype dtype) = 0;
  /// Operators on parameters without memory of their own: they are about to touch these, or have, and written[i] says
  /// which they wrote to. Any thread, several at once. `phase`: ZR_EXPORT_PHASE for a program that asked for their
  /// memory, ZR_EVAL for an operator without gradients, else ZR_FORWARD.
  struct Uses {
    std::function<void(const uint32_t* params, uint32_t n, uint32_t phase)> begin;
    std::function<void(const uint32_t* params, const bool* written, uint32_t n)> end;
    /// A shared parameter was written to, in a copy of this rank's own: it is to be taken over. Collective.
    std::function<void(uint32_t param, const void* full)> wrote;
    /// A zr::gather scope over these parameters, bound ones too, begins or ends in order. Collective; training thread.
    std::function<void(const uint32_t* params, uint32_t n, bool begins)> scope;
  };
  virtual void on_use(Uses uses) = 0;  // replaces the ones before
  /// From now on the parameter's data is `memory`, which all ranks of this host read in place and nobody writes to.
  virtual void bind_shared(uint32_t param, const void* memory, zr_dtype dtype) = 0;
  /// From now on the parameter's data has no memory but what attach() gives it, between begin and end of a use.
  virtual void unbind(uint32_t param, zr_dtype dtype) = 0;
  /// `memory` as for bind(); null takes it back.
  virtual void attach(uint32_t param, void* memory) = 0;
  /// Parameters bound by bind() that were written to in place since the last call.
  virtual std::vector<uint32_t> written() = 0;
  /// Bound parameters that tensors from before bind() may write to, which written() does not see.
  virtual std::vector<uint32_t> exposed() { return {}; }
  /// Throws Failure(user) naming a bound parameter whose data was exchanged behind the engine.
  virtual void verify() = 0;
  /// Throws Failure(user) naming `call` and a parameter that a scope of the program still holds; of `param` alone.
  virtual void check_scopes(const std::string& call) = 0;
  virtual void check_scope(uint32_t param, const std::string& call) = 0;
  /// Memory of the model's own for a parameter, which it takes at release(); throws if there is none. `other`: in that
  /// type, for the caller to fill, instead of a copy of what is bound; else null.
  virtual void* reserve_release(uint32_t, zr_dtype, bool /*other*/) { return nullptr; }
  virtual void cancel_release() {}  // frees what was reserved
  /// Converts floating-point buffers that are not of that type.
  virtual void convert_buffers(zr_dtype) {}
  /// Gives bound parameters memory of their own again, with the present values; unbound ones cannot be used any more.
  virtual void release() = 0;

  /// Called on an autograd thread, one at a time, when a parameter's gradient of this backward is there; [use].
  using Arrived = std::function<void(uint32_t param)>;
  virtual void on_gradient(Arrived arrived) = 0;  // replaces the one before; empty: none
  /// Copies elements [first, first + dst.count) of the gradient that arrived into dst, rounding to its dtype.
  virtual void copy_gradient(uint32_t param, int64_t first, const zr_view& dst) = 0;
  /// Adds those elements, in fp32, to what dst holds, rounding to its dtype.
  virtual void add_gradient(uint32_t param, int64_t first, const zr_view& dst) = 0;
  /// The gradient that arrived is no longer needed.
  virtual void drop_gradient(uint32_t param) = 0;
  /// Between backwards a parameter's own gradient is one whose use throws what to do instead; `hidden` false: none.
  virtual void hide_gradients(bool hidden) = 0;

  /// What the model's library holds beside parameters: activations, gradients under way, temporaries, batches. Of the
  /// whole process, from the moment the first model was made. [any]
  struct Temporaries {
    int64_t held = 0, peak = 0;  // bytes; peak: since forget_peak()
  };
  virtual Temporaries temporaries() const { return {}; }
  virtual void forget_peak() {}  // it is what is held now
  /// Before more than `bytes` of them would be held, over(requested) is called where they are asked for; if it returns,
  /// they are given. Replaces the limit before; empty: none.
  virtual void limit_temporaries(int64_t, const std::function<void(int64_t requested)>&) {}

  /// Keeps what autograd saves in forward for backward, as records of bytes. One call at a time, any thread.
  struct OffloadCallbacks {
    int64_t least_bytes = 0;                                       // of a storage; smaller ones stay where they are
    std::function<uint64_t(const void* data, int64_t bytes)> put;  // copied when it returns: the record's number
    std::function<void(uint64_t record, void* to)> get;            // as often as wanted
    std::function<void(const std::vector<uint64_t>& records)> prefetch;  // will be wanted next, in this order
    std::function<void(uint64_t record)> drop;                           // never wanted again; throws nothing
  };
  /// From now on, what operators of this thread save is put aside, and their memory is free once nobody else uses it.
  /// The same bits come back. Replaces the one before; without put(): autograd keeps all itself, and graphs that were
  /// made before can no longer be used.
  virtual void offload_saved_tensors(OffloadCallbacks) {}

  /// Reseeds the random generator that dropout draws from.
  virtual void seed(uint64_t seed) = 0;
};

}  // namespace zr::host
