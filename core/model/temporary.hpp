// Memory of a tensor for the duration of one operator.
#pragma once

#include <ATen/core/Tensor.h>

namespace zr::host::model {

/// A tensor with the sizes, strides and dtype of `tensor` in memory of its own, without values. Large memory is
/// returned to the system as soon as it is freed.
at::Tensor temporary_like(const at::Tensor& tensor);
/// A temporary_like() tensor with values that every operator accepts: integers are 0 (an index), other numbers 1 (a
/// probability, a deviation).
at::Tensor filled_temporary_like(const at::Tensor& tensor);

}  // namespace zr::host::model
