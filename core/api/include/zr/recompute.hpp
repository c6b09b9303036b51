// Activation checkpointing (recomputation): a block saves only its inputs in forward, and runs again in backward.
//
//   x = zr::checkpoint([block](torch::Tensor x) mutable { return block->forward(x); }, x);
//
// `mutable` is needed if `block` is a TORCH_MODULE holder, whose operator-> of a const holder returns a const module.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

namespace zr {

namespace detail {
/// The scope of the first run of a block: drops the tensors that autograd saves.
class RecomputeScope {
 public:
  RecomputeScope(std::function<void(const std::vector<torch::Tensor>&)> again,
                 const std::vector<torch::Tensor>& inputs);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class T>
inline constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, torch::Tensor>;

/// Returns the argument, or for a tensor the next of `tensors`.
template <class T>
std::decay_t<T> replaced(const T& argument, const std::vector<torch::Tensor>& tensors, size_t& next) {
  if constexpr (is_tensor<T>) return tensors[next++];
  return argument;
}
/// Returns the argument, or for a tensor an undefined tensor.
template <class T>
std::decay_t<T> without_tensor(const T& argument) {
  if constexpr (is_tensor<T>) return {};
  return argument;
}
}  // namespace detail

/// Calls fn(inputs...) and returns its result. Autograd saves no activations of the block, only parameters and inputs;
/// backward runs fn again when it first needs one: on the same inputs, with the same random numbers, grad mode,
/// autocast mode (without its cache) and default dtype. Results are bit-identical to those without recomputation, under
/// every strategy. Calls can be nested. Not collective.
///
/// fn is copied and lives as long as the autograd graph: capture modules by value; pass tensors as inputs instead of
/// capturing them. Inputs that are not tensors are copied. fn must execute the same operators both times, so call
/// train() and eval() after backward; TorchScript modules need torch::jit::setGraphExecutorOptimize(false) before their
/// first forward, because the profiling executor changes their operators between calls. Changes that its operators make
/// in place to tensors without gradient from outside the block, such as the running statistics of batch norm, happen
/// once; other side effects happen twice, such as an assignment to a variable. fn may keep a tensor that it makes in a
/// variable and read it in both runs (a cache), if the second run does not replace it. Tensor hooks that fn registers
/// on tensors that it uses are called once.
///
/// Not seen: what libtorch's version counters do not count (writes through raw pointers and Tensor::data(), and the
/// statistics that batch norm updates outside the block), numbers that fn draws from a generator of the program by hand
/// (own.get<at::CPUGeneratorImpl>()->random(): draw them outside the block), and what fn reads from variables that are
/// not tensors.
///
/// Backward throws UserError, which says what to change, if it needs a tensor that was changed in place after it was
/// saved (as libtorch does), and if the block cannot run again as it ran first: an input, a captured tensor, a buffer
/// or a parameter that it reads was changed in place after it; a variable that it reads was assigned another tensor
/// after it, or by the block itself; it changes an input, another tensor that requires gradients or memory that
/// libtorch does not own (from_blob) in place; another thread drew from a random generator that it draws from, during
/// one of the runs; autocast gave it an outdated cast from its cache; it calls torch::autograd::grad or backward
/// itself. If gradients are disabled, this is a plain call of fn(inputs...).
template <class F, class... Inputs>
auto checkpoint(F fn, const Inputs&... inputs) {
  std::vector<torch::Tensor> tensors;
  (
      [&] {
        if constexpr (detail::is_tensor<Inputs>) tensors.push_back(inputs);
      }(),
      ...);
  std::tuple<std::decay_t<Inputs>...> kept{detail::without_tensor(inputs)...};
  const detail::RecomputeScope scope(
      [fn, kept](const std::vector<torch::Tensor>& again) {
        F fresh = fn;  // which the run may change
        size_t next = 0;
        std::apply(
            [&](const auto&... arguments) {
              const std::tuple<std::decay_t<Inputs>...> all{detail::replaced(arguments, again, next)...};
              std::apply(fresh, all);
            },
            kept);
      },
      tensors);
  return fn(inputs...);
}

}  // namespace zr
