#include "model/autograd_engine.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "model/recompute.hpp"
#include "model/saved_tensor_scope.hpp"

namespace zr::host::model {

namespace {
class SavingEngine final : public torch::autograd::Engine {
 public:
  std::unique_ptr<SavedHooks> get_default_saved_variable_hooks() override { return SavedTensorScope::hooks(); }
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    check_outside_blocks();
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  static SavingEngine& instance() {
    static auto* engine = new SavingEngine;  // never destroyed: its threads may outlive statics
    return *engine;
  }
  static torch::autograd::Engine& get() { return instance(); }
  void start_threads() {
    if (device_ready_queues_.empty()) start_device_threads();
  }
};

// libtorch starts threads for devices once in a process: in the first backward, for the engine that runs it. This
// backward is the first one, unless the program has run another; then the threads may be those of another engine.
void start_threads() {
  {
    const at::AutoGradMode grad(true);
    (torch::ones({}).requires_grad_() * 1).backward();
  }
  SavingEngine::instance().start_threads();
}
}  // namespace

void install_autograd_engine() {
  static const bool installed = [] {
    if (at::accelerator::deviceCount() > 0) start_threads();
    torch::autograd::set_default_engine_stub(&SavingEngine::get);
    return true;
  }();
  (void)installed;
}

void start_autograd_threads() {
  start_threads();
  install_autograd_engine();
}

}  // namespace zr::host::model
