#include "model/saved.hpp"

#include <torch/csrc/autograd/engine.h>

namespace zr::host {

namespace {
thread_local SavedScope* innermost = nullptr;

class SavingEngine final : public torch::autograd::Engine {
 public:
  std::unique_ptr<SavedHooks> get_default_saved_variable_hooks() override { return SavedScope::hooks(); }
  static torch::autograd::Engine& get() {
    static auto* engine = new SavingEngine;  // never destroyed: its threads may outlive statics
    return *engine;
  }
};
}  // namespace

SavedScope::SavedScope(Make make) : make_(std::move(make)), outer_(innermost) {
  static const bool installed = (torch::autograd::set_default_engine_stub(&SavingEngine::get), true);
  (void)installed;
  innermost = this;
}
SavedScope::~SavedScope() { innermost = outer_; }

std::unique_ptr<SavedHooks> SavedScope::hooks() { return innermost ? innermost->make_() : nullptr; }

}  // namespace zr::host
