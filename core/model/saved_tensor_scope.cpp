#include "model/saved_tensor_scope.hpp"

#include "model/placeholder.hpp"
#include "model/process_setup.hpp"

namespace zr::host::model {

namespace {
thread_local SavedTensorScope* innermost = nullptr;
}  // namespace

bool is_free_to_save(const torch::Tensor& tensor) {
  return (tensor.is_leaf() && tensor.requires_grad()) || Placeholder::find(tensor) != nullptr;
}

int64_t version_of(const torch::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

SavedTensorScope::SavedTensorScope(Make make, bool yields)
    : make_(std::move(make)), yields_(yields), outer_(innermost) {
  ProcessSetup::begin_backward_here();
  innermost = this;
}

SavedTensorScope::~SavedTensorScope() {
  SavedTensorScope** at = &innermost;  // scopes that began later may still exist
  while (*at && *at != this) at = &(*at)->outer_;
  if (*at) *at = outer_;
}

bool SavedTensorScope::yields() { return !innermost || innermost->yields_; }

std::unique_ptr<SavedHooks> SavedTensorScope::hooks() { return innermost ? innermost->make_() : nullptr; }

}  // namespace zr::host::model
