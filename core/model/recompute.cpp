#include "model/recompute.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

#include "base/error.hpp"
#include "base/log.hpp"
#include "model/device.hpp"
#include "model/reads_again.hpp"

namespace zr::host::model {

namespace {
const char* const kGraphInsideBlock =
    "backward or torch::autograd::grad ran inside a block of zr::checkpoint, which runs again in backward; call it "
    "outside the block, or take this part out of zr::checkpoint";
thread_local int running_blocks = 0;  // of this thread

// Those of engines, and those of the inputs: the process may have no engine. Tensors on the Meta device have no random
// state.
std::vector<at::Device> devices_of(const std::vector<torch::Tensor>& inputs) {
  std::vector<at::Device> devices = devices_in_use();
  const std::optional<at::DeviceType> accelerator = at::getAccelerator(false);
  for (const torch::Tensor& input : inputs)
    if (input.defined() && input.device().type() == accelerator &&
        std::ranges::find(devices, input.device()) == devices.end())
      devices.push_back(input.device());
  return devices;
}

// Restores the modes of the calling thread.
class Modes {
 public:
  Modes(const OperatorModes& modes, const std::vector<at::Device>& devices) : before_(OperatorModes::current(devices)) {
    modes.restore();
  }
  ~Modes() { before_.restore(); }
  Modes(const Modes&) = delete;

 private:
  const OperatorModes before_;
};

// Disables autocast's cache before each operator: a region of autocast in the block may have enabled it. The cache
// belongs to the forward pass; the casts of a second run would stay in it with the weights of this backward.
class WithoutCastCache final : private OperatorObserver {
  void begins(const OperatorCall&) override { at::autocast::set_autocast_cache_enabled(false); }
  void ended(const std::vector<c10::IValue>&) override {}
};

// The node before an input of a block that runs again: the input then is no leaf, as in the first run.
class InputNode final : public torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { fail_user(kGraphInsideBlock); }
};

torch::Tensor input_again(const torch::Tensor& tensor, bool requires_grad) {
  if (!tensor.defined()) return tensor;
  torch::Tensor values = tensor.detach();
  if (!requires_grad) return values;
  const std::shared_ptr<InputNode> node(new InputNode, torch::autograd::deleteNode);
  return torch::autograd::make_variable(values, torch::autograd::Edge(node, 0));
}
}  // namespace

// The hooks of one tensor that the first run saves.
class RecomputeFrame::Dropped final : public SavedHooks {
 public:
  explicit Dropped(std::shared_ptr<RecomputeFrame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const torch::Tensor& tensor) override {
    version_ = TensorVersion(tensor);
    if (is_free_to_save(tensor)) {
      kept_ = tensor;
      return;
    }
    index_ = frame_->dropped_.size();
    frame_->dropped_.emplace_back(tensor);
  }
  torch::Tensor call_unpack_hook() override {
    version_.check_saved();
    return kept_.defined() ? kept_ : frame_->take(index_);
  }

 private:
  std::shared_ptr<RecomputeFrame> frame_;
  torch::Tensor kept_;
  TensorVersion version_;
  std::size_t index_ = 0;
};

// Collects the tensors that a later run saves. The graph of that run is discarded, so they are never unpacked.
class RecomputeFrame::Recorded final : public SavedHooks {
 public:
  explicit Recorded(std::vector<torch::Tensor>& values) : values_(values) {}
  void call_pack_hook(const torch::Tensor& tensor) override {
    if (!is_free_to_save(tensor)) values_.push_back(tensor.detach());
  }
  torch::Tensor call_unpack_hook() override { fail_user(kGraphInsideBlock); }

 private:
  std::vector<torch::Tensor>& values_;
};

RunningBlock::RunningBlock() { ++running_blocks; }
RunningBlock::~RunningBlock() { --running_blocks; }

void check_outside_blocks() {
  if (running_blocks > 0) fail_user(kGraphInsideBlock);
}

RecomputeFrame::RecomputeFrame(Block again, const std::vector<torch::Tensor>& inputs)
    : again_(std::move(again)),
      devices_(devices_of(inputs)),
      modes_(OperatorModes::current(devices_).without_cast_cache()),
      outside_(inputs),
      draws_(devices_) {
  for (const torch::Tensor& tensor : inputs) {
    Input input;
    input.requires_grad = tensor.defined() && tensor.requires_grad();
    const bool kept_itself = !tensor.defined() || is_free_to_save(tensor);
    if (!kept_itself) input.dropped = SavedTensorScope::hooks();
    if (input.dropped) {
      const at::NoGradGuard no_grad;
      input.dropped->call_pack_hook(tensor);
    } else {
      // Not the tensor itself: if the block changes it in place, its graph would contain this frame.
      input.kept = kept_itself ? tensor : tensor.detach();
    }
    inputs_.push_back(std::move(input));
  }
}

torch::Tensor RecomputeFrame::take(std::size_t index) {
  if (first_run_) fail_user(kGraphInsideBlock);
  const MutexLock lock(mutex_);
  if (values_.size() <= index || !values_[index].defined()) {
    values_.clear();
    values_ = run_again();
  }
  return std::move(values_[index]);
}

std::vector<torch::Tensor> RecomputeFrame::inputs_again() {
  std::vector<torch::Tensor> inputs;
  for (Input& input : inputs_) {
    const torch::Tensor tensor = input.dropped ? input.dropped->call_unpack_hook() : input.kept;
    const bool kept_itself = !input.dropped && (!tensor.defined() || is_free_to_save(tensor));
    inputs.push_back(kept_itself ? tensor : input_again(tensor, input.requires_grad));
  }
  return inputs;
}

std::vector<torch::Tensor> RecomputeFrame::run_again() {
  outside_.check();
  std::vector<torch::Tensor> values;
  {
    const Modes modes(modes_, devices_);
    const std::vector<torch::Tensor> inputs = inputs_again();
    const OutsideTensors::Restored outside(outside_);
    BlockDraws::Repeated draws(draws_);
    std::string other_reads;
    {
      const SavedTensorScope scope([&] { return std::make_unique<Recorded>(values); });
      std::optional<WithoutCastCache> without_cast_cache;
      if (outside_.met_cast_cache()) without_cast_cache.emplace();
      const ReadsAgain reads(outside_.met(), inputs);
      const RunningBlock running;
      again_(inputs);
      other_reads = reads.fault(values);
    }
    draws.finish();
    check_same_operators(values);
    if (!other_reads.empty()) fail_user(other_reads);
    outside.check();
  }
  return values;
}

void RecomputeFrame::check_same_operators(const std::vector<torch::Tensor>& values) const {
  const std::string rule =
      "; both runs must execute the same operators, so the block may depend only on its inputs and the model: call "
      "train() and eval() after backward; for a TorchScript module, whose profiling executor changes the operators "
      "between its calls, call torch::jit::setGraphExecutorOptimize(false) before its first forward";
  if (values.size() != dropped_.size())
    fail_user("the block of zr::checkpoint saved " + std::to_string(values.size()) +
              " tensors when it was recomputed, but " + std::to_string(dropped_.size()) + " in its first run" + rule);
  for (std::size_t i = 0; i < values.size(); ++i)
    if (Form(values[i]) != dropped_[i])
      fail_user(
          "the block of zr::checkpoint saved tensors of other shapes or types when it was recomputed than in its "
          "first run" +
          rule);
}

RecomputeFrame::FirstRun::FirstRun(std::shared_ptr<RecomputeFrame> frame)
    : frame_(std::move(frame)), scope_([frame = frame_] { return std::make_unique<Dropped>(frame); }) {}

RecomputeFrame::FirstRun::~FirstRun() {
  log_exception_of([&] {
    frame_->outside_.end();
    frame_->draws_.end();
  });
  frame_->first_run_ = false;
}

void RecomputeFrame::FirstRun::begins(const OperatorCall& call) {
  frame_->outside_.begins(call);
  frame_->draws_.begins(call);
}

void RecomputeFrame::FirstRun::ended(const std::vector<c10::IValue>& results) { frame_->outside_.ended(results); }

}  // namespace zr::host::model
