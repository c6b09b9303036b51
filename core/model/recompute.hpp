// A block of a model whose activations are dropped after its forward and recomputed when backward reaches it.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "model/device.hpp"
#include "model/saved_tensor_scope.hpp"

namespace zr::host::model {

/// Autocast of one device type on this thread.
struct AutocastMode {
  at::DeviceType type;
  bool enabled;
  at::ScalarType dtype;
  /// The modes of the types of these devices.
  static std::vector<AutocastMode> current(const std::vector<at::Device>& devices);
  void restore() const;
};

/// One run of a block. The tensors that its operators save are dropped, except parameters. When backward needs the
/// first of these tensors, the block runs again, with the same random state and autocast mode, and the frame keeps the
/// tensors that this run saves until backward takes them. No backward runs inside backward, so each gradient arrives
/// once. Frames nest: the outer frame drops the inputs of the inner one.
class RecomputeFrame : public std::enable_shared_from_this<RecomputeFrame> {
 public:
  using Block = std::function<void(const std::vector<torch::Tensor>& inputs)>;
  /// `again` runs the block; its results are not used.
  RecomputeFrame(Block again, const std::vector<torch::Tensor>& inputs);
  /// Hooks for a SavedTensorScope around the first run.
  SavedTensorScope::Make hooks();

 private:
  class Dropped;
  class Recorded;
  struct Input {
    torch::Tensor kept;
    std::unique_ptr<SavedHooks> dropped;  // set instead if the enclosing frame dropped the input
    bool requires_grad = false;
    int64_t version = 0;
  };
  torch::Tensor take(std::size_t index);
  void run_again();

  Block again_;
  std::vector<Input> inputs_;
  std::vector<at::Device> devices_;  // whose random state and autocast mode the block may use
  RandomState random_;
  std::vector<AutocastMode> autocast_;
  std::size_t dropped_ = 0;            // tensors dropped in the first run
  std::vector<torch::Tensor> values_;  // of the last run, until taken
};

}  // namespace zr::host::model
