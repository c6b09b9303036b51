// The effect of an operator on shapes, without the values of its arguments.
#pragma once

#include <unordered_map>
#include <vector>

#include "model/stack_tensors.hpp"

namespace zr::host::model {

/// One call of an operator on other tensors with the shapes of its arguments.
class ShapeCall {
 public:
  /// On meta tensors, which share storages as the arguments do; or, because not every operator supports meta tensors,
  /// on temporary memory in place of placeholders.
  enum class On { meta, memory };
  /// Prepares the call with the last elements of the stack.
  ShapeCall(const c10::OperatorHandle& op, const Stack& stack, On on = On::meta);
  /// Runs the operator. Throws c10::Error, also if the operator needs values.
  void run();
  /// The results; their tensors have shapes and types, not values.
  const Stack& results() const { return values_; }
  /// The argument that a result is; undefined if it is another tensor.
  at::Tensor argument(const at::Tensor& result) const;
  /// A new tensor on the storage of an argument that the result shares; undefined if the result's storage is new.
  at::Tensor alias(const at::Tensor& result) const;
  /// Gives the arguments that the operator resized their new shapes.
  void resize_arguments() const;

 private:
  struct Argument {
    at::Tensor original, other;
    int64_t shift;  // from the offset of `other` to that of `original`
  };
  at::Tensor other_for(const at::Tensor& tensor);
  at::Tensor make_meta(const at::Tensor& tensor);

  const c10::OperatorHandle op_;
  const On on_;
  Stack values_;  // arguments before run(), results after
  std::vector<Argument> arguments_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

/// Enlarges a placeholder's storage to `bytes`, if it is smaller.
void grow(const c10::Storage& storage, std::size_t bytes);

}  // namespace zr::host::model
