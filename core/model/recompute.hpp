// A block of a model whose activations are dropped after its forward and computed again when backward comes to it.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "model/saved_tensor_scope.hpp"

namespace zr::host {

/// One run of a block. What its operators save is dropped, but for parameters; the first that backward asks for runs
/// the block anew, with the same random state and autocast mode, and keeps what it saves until it is asked for. No
/// backward runs inside backward, so that gradients arrive once. Frames nest: what an inner one starts from is dropped
/// by the outer one.
class RecomputeFrame : public std::enable_shared_from_this<RecomputeFrame> {
 public:
  using Block = std::function<void(const std::vector<torch::Tensor>& inputs)>;
  /// `again` runs the block; its results are not used.
  RecomputeFrame(Block again, const std::vector<torch::Tensor>& inputs);
  /// For SavedTensorScope around the first run.
  SavedTensorScope::Make hooks();

 private:
  class Dropped;
  class Recorded;
  struct Input {
    torch::Tensor kept;
    std::unique_ptr<SavedHooks> dropped;  // by the enclosing frame, instead
    bool requires_grad = false;
    int64_t version = 0;
  };
  torch::Tensor take(std::size_t index);
  void run_again();

  Block again_;
  std::vector<Input> inputs_;
  torch::Tensor random_;
  bool autocast_;
  at::ScalarType autocast_type_;
  std::size_t dropped_ = 0;            // in the first run
  std::vector<torch::Tensor> values_;  // of the last run, until taken
};

}  // namespace zr::host
