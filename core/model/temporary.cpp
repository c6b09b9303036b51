#include "model/temporary.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

namespace zr::host::model {

// The C library keeps large blocks that are freed: it raises its threshold for blocks of their own.
at::Tensor temporary_like(const at::Tensor& tensor) {
  constexpr std::size_t kLarge = std::size_t{1} << 20;
  const at::TensorOptions options = tensor.options().requires_grad(false);
  const std::size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  if (bytes < kLarge) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "can't allocate memory: ", bytes, " bytes");
  return at::from_blob(
      memory, tensor.sizes(), tensor.strides(), [bytes](void* mapped) { ::munmap(mapped, bytes); }, options);
}

at::Tensor filled_temporary_like(const at::Tensor& tensor) {
  at::Tensor memory = temporary_like(tensor);
  return memory.fill_(at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) ? 0 : 1);
}

}  // namespace zr::host::model
