// Memory of a tensor for the duration of one operator.
#pragma once

#include <ATen/core/Tensor.h>

namespace zr::host::model {

/// A tensor with the sizes, strides and dtype of `tensor` in memory of its own, without values. Large memory is
/// returned to the system as soon as it is freed.
at::Tensor temporary_like(const at::Tensor& tensor);
/// The same with valid values of any operator: integers are 0 (an index), other numbers 1 (a probability, a deviation).
at::Tensor filled_temporary_like(const at::Tensor& tensor);

}  // namespace zr::host::model
