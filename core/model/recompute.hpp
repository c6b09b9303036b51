// A block of a model whose activations are dropped after its forward and recomputed when backward reaches it.
#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/block_draws.hpp"
#include "model/operator_modes.hpp"
#include "model/operator_observer.hpp"
#include "model/outside_tensors.hpp"
#include "model/saved_tensor_scope.hpp"
#include "zr/mutex.hpp"

namespace zr::host::model {

/// Exists while this thread runs a block, the first time or again.
class RunningBlock {
 public:
  RunningBlock();
  ~RunningBlock();
  RunningBlock(const RunningBlock&) = delete;
};
/// Throws UserError if this thread runs a block: backward and torch::autograd::grad there would run again with the
/// block, and would then call hooks that the program has registered since.
void check_outside_blocks();

/// One run of a block. The tensors that its operators save are dropped, except parameters. When backward needs the
/// first of these tensors, the block runs again on the same values, in the same modes and with the same random numbers,
/// and the frame keeps the tensors that this run saves until backward takes them. No backward runs inside backward, so
/// each gradient arrives once. Frames nest: the outer frame drops the inputs of the inner one.
///
/// Backward throws UserError if it would compute with other values than without a frame: as libtorch does, if a saved
/// tensor was changed in place after it was saved; also if the block cannot be run again as it ran first. Any thread of
/// autograd may take tensors, several at once.
class RecomputeFrame : public std::enable_shared_from_this<RecomputeFrame> {
 public:
  using Block = std::function<void(const std::vector<torch::Tensor>& inputs)>;
  class FirstRun;
  /// `again` runs the block; its results are not used.
  RecomputeFrame(Block again, const std::vector<torch::Tensor>& inputs);

 private:
  class Dropped;
  class Recorded;
  struct Input {
    torch::Tensor kept;
    std::unique_ptr<SavedHooks> dropped;  // set instead if the enclosing frame dropped the input
    bool requires_grad = false;
  };
  // Shape and type of a dropped tensor.
  struct Form {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    explicit Form(const torch::Tensor& tensor) : sizes(sizes_of(tensor)), dtype(tensor.scalar_type()) {}
    bool operator==(const Form&) const = default;
  };
  torch::Tensor take(std::size_t index);
  std::vector<torch::Tensor> inputs_again();
  std::vector<torch::Tensor> run_again();
  void check_same_operators(const std::vector<torch::Tensor>& values) const;

  Block again_;
  std::vector<Input> inputs_;
  const std::vector<at::Device> devices_;  // whose random state and autocast mode the block may use
  const OperatorModes modes_;
  OutsideTensors outside_;
  BlockDraws draws_;
  bool first_run_ = true;  // not over
  std::vector<Form> dropped_;
  Mutex mutex_;
  std::vector<torch::Tensor> values_ ZR_GUARDED_BY(mutex_);  // of the last run, until taken
};

/// Exists during the block's first run, on its thread.
class RecomputeFrame::FirstRun final : private OperatorObserver {
 public:
  explicit FirstRun(std::shared_ptr<RecomputeFrame> frame);
  ~FirstRun() override;

 private:
  void begins(const OperatorCall& call) override;
  void ended(const std::vector<c10::IValue>& results) override;

  const std::shared_ptr<RecomputeFrame> frame_;
  const SavedTensorScope scope_;
  const RunningBlock running_;
};

}  // namespace zr::host::model
