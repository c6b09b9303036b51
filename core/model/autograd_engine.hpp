// The autograd engine that takes hooks for saved tensors from SavedTensorScope.
#pragma once

#include <torch/csrc/autograd/engine.h>

namespace zr::host::model {

/// libtorch begins every backward of C++ here, and takes the hooks of each saved tensor from here. Backward itself runs
/// on the engine that was libtorch's default before: if that is libtorch's own, on this one, which has threads for
/// every device. Never destroyed.
class SavingEngine final : public torch::autograd::Engine {
 public:
  /// Makes an engine of this kind libtorch's default, on top of the present one; without effect if it is one already,
  /// and within a backward. [any]
  static void make_default();
  /// Runs a small backward. Starts threads for the devices that libtorch knows now, unless another engine than
  /// libtorch's own and this one runs backward.
  static void start_threads();

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override;
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, std::shared_ptr<torch::autograd::Node> root,
      torch::autograd::InputBuffer&& input) override;
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override;
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                           const std::shared_ptr<torch::autograd::Node>& node, std::exception& exception) override;
  /// The hooks of the innermost SavedTensorScope. Without a scope, and in a scope that yields, the hooks of the engine
  /// below, if it has some.
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override;

 private:
  explicit SavingEngine(torch::autograd::Engine* below) : below_(below) {}
  static SavingEngine& on_libtorchs_own();
  static torch::autograd::Engine& newest();

  torch::autograd::Engine* const below_;  // runs backward; null: this engine does
};

}  // namespace zr::host::model
