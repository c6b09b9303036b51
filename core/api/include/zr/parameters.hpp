// Parameters as memory: real pointers while a scope lives, and models that are built without ever being whole.
#pragma once

#include <torch/types.h>

#include <memory>
#include <vector>

namespace zr {

/// While it lives, the parameters have memory that may be read and written by pointer (data_ptr, accessor,
/// torch::save, torch::load of the whole model): whole, in train.dtype, equal on all ranks. What was written is taken
/// over at the end; write the same on all ranks. What an exception leaves is not. Weights that the ranks of a host
/// share are copied for it. Collective under every strategy, as is its end; on the training thread, and ended before
/// engine.step(). One that outlives its engine ends without effect.
class Gathered {
 public:
  explicit Gathered(const std::vector<torch::Tensor>& parameters);
  ~Gathered() noexcept(false);
  Gathered(const Gathered&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// `const auto scope = zr::gather(model->parameters());` Tensors that no engine trains are left as they are.
inline Gathered gather(const std::vector<torch::Tensor>& parameters) { return Gathered(parameters); }
/// One parameter.
inline Gathered gather(const torch::Tensor& parameter) { return Gathered({parameter}); }

namespace detail {
/// Records what this thread's constructors do.
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

/// `auto model = zr::deferred([&] { return Gpt(config); });` builds an ordinary model that has no memory: its
/// constructors' operators are recorded, and run when its zr::Engine is made, one parameter in memory at a time, with
/// the random state of now; the same bits as plain construction. Random numbers drawn between the two are drawn from
/// the state before. A constructor that needs values (item(), a loaded file's shape by data) is refused by name.
/// Parameters are fp32; train.dtype decides in what they are trained.
template <class F>
auto deferred(F&& build) {
  const detail::DeferredScope scope;
  return build();
}

}  // namespace zr
