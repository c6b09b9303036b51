#include "model/saved_tensor_scope.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "model/placeholder.hpp"

namespace zr::host::model {

namespace {
thread_local SavedTensorScope* innermost = nullptr;

class SavingEngine final : public torch::autograd::Engine {
 public:
  std::unique_ptr<SavedHooks> get_default_saved_variable_hooks() override { return SavedTensorScope::hooks(); }
  static SavingEngine& instance() {
    static auto* engine = new SavingEngine;  // never destroyed: its threads may outlive statics
    return *engine;
  }
  static torch::autograd::Engine& get() { return instance(); }
  void start_threads() {
    if (device_ready_queues_.empty()) start_device_threads();
  }
};

void install() {
  static const bool installed = (torch::autograd::set_default_engine_stub(&SavingEngine::get), true);
  (void)installed;
}
}  // namespace

// libtorch starts an engine's threads for devices once in a process, in the first backward, whose engine may be another
// one.
void start_autograd_threads() {
  {
    const at::AutoGradMode grad(true);
    (torch::ones({}).requires_grad_() * 1).backward();
  }
  SavingEngine::instance().start_threads();
  install();
}

bool is_free_to_save(const torch::Tensor& tensor) {
  return (tensor.is_leaf() && tensor.requires_grad()) || Placeholder::find(tensor) != nullptr;
}

int64_t version_of(const torch::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

SavedTensorScope::SavedTensorScope(Make make) : make_(std::move(make)), outer_(innermost) {
  install();
  innermost = this;
}

SavedTensorScope::~SavedTensorScope() {
  SavedTensorScope** at = &innermost;  // scopes that began later may still exist
  while (*at && *at != this) at = &(*at)->outer_;
  if (*at) *at = outer_;
}

std::unique_ptr<SavedHooks> SavedTensorScope::hooks() { return innermost ? innermost->make_() : nullptr; }

}  // namespace zr::host::model
