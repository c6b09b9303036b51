// Moves a module between the CPU and a PrivateUse1 device, where Module::to() fails with "incompatible tensor type".
#pragma once

#include <torch/torch.h>

#include <unordered_map>

namespace zr::test::sim {

// Each tensor keeps its identity and its place in the autograd graph; a tensor with several names moves once.
inline void move_to(torch::nn::Module& module, const at::Device& device) {
  const torch::NoGradGuard no_grad;
  std::unordered_map<const c10::TensorImpl*, bool> moved;
  const auto move = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !moved.emplace(tensor.unsafeGetTensorImpl(), true).second) return;
    if (tensor.device() == device) return;
    const at::Tensor copy = tensor.detach().to(device);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(copy.getIntrusivePtr());
  };
  for (const at::Tensor& each : module.parameters()) move(each);
  for (const at::Tensor& each : module.buffers()) move(each);
}

}  // namespace zr::test::sim
