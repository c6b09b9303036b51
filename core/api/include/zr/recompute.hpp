// Activation recomputation: a block keeps nothing for its backward but its inputs, and runs a second time there.
//
//   x = recompute ? zr::checkpoint([block](torch::Tensor x) { return block->forward(x); }, x) : block->forward(x);
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

namespace zr {

namespace detail {
/// Around the first run of a block.
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

/// The argument, or the next tensor in its place.
template <class T>
std::decay_t<T> replaced(const T& argument, const std::vector<torch::Tensor>& tensors, size_t& next) {
  if constexpr (is_tensor<T>) return tensors[next++];
  return argument;
}
/// The argument; of a tensor nothing.
template <class T>
std::decay_t<T> without_tensor(const T& argument) {
  if constexpr (is_tensor<T>) return {};
  return argument;
}
}  // namespace detail

/// fn(inputs...), whose operators keep nothing for backward but parameters; the first gradient that needs more runs fn
/// again on the same inputs, with the same random state and autocast mode. fn is copied, and lives as long as the
/// graph: capture modules by value, tensors not at all (pass them as inputs; other inputs are copied). It must do the
/// same both times; what it changes besides (running statistics of a batch norm) changes twice. May be nested; any
/// strategy; the same bits as without. Inputs may not be changed in place afterwards. Without autograd it is
/// fn(inputs...).
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
      [fn, kept](const std::vector<torch::Tensor>& again) mutable {
        size_t next = 0;
        std::apply(
            [&](const auto&... arguments) {
              std::tuple<std::decay_t<Inputs>...> all{detail::replaced(arguments, again, next)...};
              std::apply(fn, std::move(all));
            },
            kept);
      },
      tensors);
  return fn(inputs...);
}

}  // namespace zr
