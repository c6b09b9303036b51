// libtorch's functions behind the methods of a tensor, with a call when data() makes a tensor.
#pragma once

#include <ATen/core/VariableHooksInterface.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace zr::host::model {

/// Forwards to the hooks that were installed before, and calls made() when data() makes a tensor. [any]
class WatchingHooks final : public at::impl::VariableHooksInterface {
 public:
  using Made = void (*)(const at::TensorBase& made);
  WatchingHooks(VariableHooksInterface* original, Made made) : original_(*original), made_(made) {}

  at::TensorBase variable_data(const at::TensorBase& self) const override {
    at::TensorBase made = original_.variable_data(self);
    made_(made);
    return made;
  }
  at::TensorBase data(const at::TensorBase& self) const override { return variable_data(self); }

  at::TensorBase tensor_data(const at::TensorBase& self) const override { return original_.tensor_data(self); }
  const std::shared_ptr<torch::autograd::Node>& grad_fn(const at::TensorBase& self) const override {
    return original_.grad_fn(self);
  }
  unsigned _register_hook(const at::TensorBase& self,
                          std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return original_._register_hook(self, std::move(hook));
  }
  void remove_hook(const at::TensorBase& self, unsigned at) const override { original_.remove_hook(self, at); }
  bool is_view(const at::TensorBase& self) const override { return original_.is_view(self); }
  const at::TensorBase& base(const at::TensorBase& self) const override { return original_.base(self); }
  const std::string& name(const at::TensorBase& self) const override { return original_.name(self); }
  bool is_leaf(const at::TensorBase& self) const override { return original_.is_leaf(self); }
  int64_t output_nr(const at::TensorBase& self) const override { return original_.output_nr(self); }
  void set_data(const at::TensorBase& self, const at::TensorBase& other) const override {
    original_.set_data(self, other);
  }
  int64_t _version(const at::TensorBase& self) const override { return original_._version(self); }
  void retain_grad(const at::TensorBase& self) const override { original_.retain_grad(self); }
  bool retains_grad(const at::TensorBase& self) const override { return original_.retains_grad(self); }
  void _backward(const at::Tensor& self, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    original_._backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& self, bool requires_grad) const override {
    original_.requires_grad_(self, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    original_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& self) const override {
    return original_.grad_dtype(self);
  }
  void set_grad_dtype(const at::TensorBase& self, const std::optional<c10::ScalarType>& type) const override {
    original_.set_grad_dtype(self, type);
  }

 private:
  const VariableHooksInterface& original_;
  const Made made_;
};

}  // namespace zr::host::model
