// zr::gather: access to the full values of parameters by pointer. zr::deferred: models built without their memory.
#pragma once

#include <torch/types.h>

#include <memory>
#include <vector>

namespace zr {

/// A scope in which the given parameters can be read and written by pointer (data_ptr, accessor, torch::save or
/// torch::load of the model): unsharded, contiguous, in train.dtype, with the same values on all ranks. Pointers are
/// valid until the scope ends; they point to memory of the engine's device. Tensors that no engine trains are left as
/// they are.
///
/// The end of the scope stores the written values in the engine; write the same values on all ranks. If an exception
/// ends a scope that wrote values, these parameters are undefined, and differ between strategies: set all of them again
/// with engine.set(), or load a checkpoint, before training continues. If the engine is destroyed first, the end has no
/// effect. Weights that the ranks of a node share (communicator.share_weights) are copied for the scope, so it needs
/// memory for them.
///
/// Do not write by pointer outside such a scope: the engine throws where weights are shared or sharded, but where each
/// rank has its own copy, it may not notice that the copies differ.
///
/// The begin and the end are collective under every strategy. Use the scope on the training thread and end it before
/// engine.step(). Throws zr::Error.
class Gathered {
 public:
  /// Begins the scope. Collective.
  explicit Gathered(const std::vector<torch::Tensor>& parameters);
  /// Ends the scope. Collective, unless an exception unwinds the stack. May throw zr::Error.
  ~Gathered() noexcept(false);
  Gathered(const Gathered&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Begins a scope for these parameters: `const auto scope = zr::gather(model->parameters());`. Collective.
inline Gathered gather(const std::vector<torch::Tensor>& parameters) { return Gathered(parameters); }
/// Begins a scope for one parameter. Collective.
inline Gathered gather(const torch::Tensor& parameter) { return Gathered({parameter}); }

namespace detail {
/// While it exists, tensor operators on this thread that construct a model are recorded instead of executed.
class DeferredScope {
 public:
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
}  // namespace detail

/// Builds a model without allocating its parameters: `auto model = zr::deferred([&] { return Gpt(config); });`.
/// Returns what `build` returns. The operators of the constructors are recorded and run when the zr::Engine of the
/// model is created. All parameters, buffers and other tensors of the model are then bit-identical to those of an
/// ordinary construction at this place, on all ranks. Random generators are left as an ordinary construction leaves
/// them, also those that the constructor seeds, clones or draws from itself; creating the engine does not change them.
///
/// Memory: one full parameter at a time, and the temporary tensors of the operator that runs. A random operator also
/// uses the memory and the time of its tensor when it is recorded, because the generator must advance. A parameter that
/// is not row-major fp32, or that shares a storage, has memory from its first operator to its last one. Ordinary
/// tensors that operators use are copied. The tensors have no values before the engine exists, except that a tensor of
/// at most 1 MiB that torch::empty() made can be written by pointer until the first operator uses it, as
/// torch::tensor() of a vector does, and read until an operator changes it. A model without an engine is freed when its
/// tensors are, at the latest by the next call.
///
/// A call within another one belongs to that one. Operators of other threads are not recorded. Not collective.
/// Throws UserError, which names the operator, if a constructor needs the values of a tensor (for example item()),
/// draws a number of random numbers that depends on values (torch::poisson), writes a deferred tensor into an ordinary
/// one, or enables autocast. Errors of operators that depend on values are thrown when the engine is created; they name
/// the operator and the parameter.
template <class F>
auto deferred(F&& build) {
  const detail::DeferredScope scope;
  return build();
}

}  // namespace zr
