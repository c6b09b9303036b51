#include "model/autograd_engine.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <map>
#include <typeinfo>  // NOLINT(misc-include-cleaner): for typeid

#include "model/recompute.hpp"
#include "model/saved_tensor_scope.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

using torch::autograd::Engine;

namespace {
std::atomic<SavingEngine*> newest_engine{nullptr};
Mutex changes;  // of the default engine
}  // namespace

torch::autograd::variable_list SavingEngine::execute(const torch::autograd::edge_list& roots,
                                                     const torch::autograd::variable_list& inputs, bool keep_graph,
                                                     bool create_graph, bool accumulate_grad,
                                                     const torch::autograd::edge_list& outputs) {
  check_outside_blocks();
  return below_ ? below_->execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs)
                : Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
}

c10::intrusive_ptr<at::ivalue::Future> SavingEngine::execute_with_graph_task(
    const std::shared_ptr<torch::autograd::GraphTask>& task, std::shared_ptr<torch::autograd::Node> root,
    torch::autograd::InputBuffer&& input) {
  return below_ ? below_->execute_with_graph_task(task, std::move(root), std::move(input))
                : Engine::execute_with_graph_task(task, std::move(root), std::move(input));
}

std::unique_ptr<torch::autograd::AnomalyMetadata> SavingEngine::make_anomaly_metadata() {
  return below_ ? below_->make_anomaly_metadata() : Engine::make_anomaly_metadata();
}

void SavingEngine::thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                                       const std::shared_ptr<torch::autograd::Node>& node, std::exception& exception) {
  below_ ? below_->thread_on_exception(task, node, exception) : Engine::thread_on_exception(task, node, exception);
}

std::unique_ptr<SavedHooks> SavingEngine::get_default_saved_variable_hooks() {
  if (below_ && SavedTensorScope::yields())
    if (auto hooks = below_->get_default_saved_variable_hooks()) return hooks;
  return SavedTensorScope::hooks();
}

SavingEngine& SavingEngine::on_libtorchs_own() {
  static auto* engine = new SavingEngine(nullptr);  // never destroyed: its threads may outlive statics
  return *engine;
}

Engine& SavingEngine::newest() { return *newest_engine.load(); }

void SavingEngine::make_default() {
  const auto is_default = [] { return &Engine::get_default_engine() == newest_engine.load(); };
  if (is_default() || torch::autograd::get_current_graph_task_id() >= 0) return;
  const MutexLock lock(changes);
  if (is_default()) return;
  Engine& present = Engine::get_default_engine();
  if (typeid(present) != typeid(Engine)) {
    static auto* engines = new std::map<Engine*, SavingEngine*>;  // by the engine below, which may return
    SavingEngine*& engine = (*engines)[&present];
    if (!engine) engine = new SavingEngine(&present);
    newest_engine = engine;
  } else {
    if (at::accelerator::deviceCount() > 0) start_threads();
    SavingEngine& engine = on_libtorchs_own();
    if (!engine.thread_pool_shared_) engine.start_device_threads();  // for deep nesting of backwards
    newest_engine = &engine;
  }
  torch::autograd::set_default_engine_stub(&SavingEngine::newest);
}

// libtorch starts threads for devices once in a process: in the first backward, for the engine that runs it. This
// backward is the first one, unless the program has run another; then the threads may be those of another engine.
void SavingEngine::start_threads() {
  {
    const at::AutoGradMode grad(true);
    (torch::ones({}).requires_grad_() * 1).backward();
  }
  SavingEngine& engine = on_libtorchs_own();
  const Engine& present = Engine::get_default_engine();
  if (&present != &engine && typeid(present) != typeid(Engine)) return;
  if (engine.device_ready_queues_.empty()) engine.start_device_threads();
}

}  // namespace zr::host::model
