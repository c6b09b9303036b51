#include "model/saved_tensor_scope.hpp"

#include "model/autograd_engine.hpp"
#include "model/placeholder.hpp"

namespace zr::host::model {

namespace {
thread_local SavedTensorScope* innermost = nullptr;
}  // namespace

bool is_free_to_save(const torch::Tensor& tensor) {
  return (tensor.is_leaf() && tensor.requires_grad()) || Placeholder::find(tensor) != nullptr;
}

int64_t version_of(const torch::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

SavedTensorScope::SavedTensorScope(Make make) : make_(std::move(make)), outer_(innermost) {
  install_autograd_engine();
  innermost = this;
}

SavedTensorScope::~SavedTensorScope() {
  SavedTensorScope** at = &innermost;  // scopes that began later may still exist
  while (*at && *at != this) at = &(*at)->outer_;
  if (*at) *at = outer_;
}

std::unique_ptr<SavedHooks> SavedTensorScope::hooks() { return innermost ? innermost->make_() : nullptr; }

}  // namespace zr::host::model
