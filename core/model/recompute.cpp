#include "model/recompute.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

#include "base/error.hpp"

namespace zr::host::model {

namespace {
// Restores the random state and autocast mode of the block's first run while the block runs again.
class Restored {
 public:
  Restored(const std::vector<at::Device>& devices, const RandomState& random, const std::vector<AutocastMode>& autocast)
      : random_(RandomState::current(devices)), autocast_(AutocastMode::current(devices)) {
    random.restore();
    for (const AutocastMode& mode : autocast) mode.restore();
  }
  ~Restored() {
    random_.restore();
    for (const AutocastMode& mode : autocast_) mode.restore();
  }

 private:
  RandomState random_;
  std::vector<AutocastMode> autocast_;
};
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
}  // namespace

std::vector<AutocastMode> AutocastMode::current(const std::vector<at::Device>& devices) {
  std::vector<AutocastMode> modes;
  for (const at::Device& device : devices) {
    const at::DeviceType type = device.type();
    modes.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  return modes;
}

void AutocastMode::restore() const {
  at::autocast::set_autocast_enabled(type, enabled);
  at::autocast::set_autocast_dtype(type, dtype);
}

// The hooks of one tensor that the first run saves.
class RecomputeFrame::Dropped final : public SavedHooks {
 public:
  explicit Dropped(std::shared_ptr<RecomputeFrame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const torch::Tensor& tensor) override {
    if (is_free_to_save(tensor))
      kept_ = tensor;
    else
      index_ = frame_->dropped_++;
  }
  torch::Tensor call_unpack_hook() override { return kept_.defined() ? kept_ : frame_->take(index_); }

 private:
  std::shared_ptr<RecomputeFrame> frame_;
  torch::Tensor kept_;
  std::size_t index_ = 0;
};

// Collects the tensors that a later run saves. The graph of that run is discarded, so they are never unpacked.
class RecomputeFrame::Recorded final : public SavedHooks {
 public:
  Recorded(std::vector<torch::Tensor>& values, const std::vector<torch::Tensor>& leaves)
      : values_(values), leaves_(leaves) {}
  void call_pack_hook(const torch::Tensor& tensor) override {
    const bool made_leaf =
        std::any_of(leaves_.begin(), leaves_.end(), [&](const torch::Tensor& leaf) { return leaf.is_same(tensor); });
    if (made_leaf || !is_free_to_save(tensor)) values_.push_back(tensor.detach());
  }
  torch::Tensor call_unpack_hook() override { fail_internal("the graph of a recomputed block was used"); }

 private:
  std::vector<torch::Tensor>& values_;
  const std::vector<torch::Tensor>& leaves_;  // the block's inputs, which were not leaf tensors in the first run
};

RecomputeFrame::RecomputeFrame(Block again, const std::vector<torch::Tensor>& inputs)
    : again_(std::move(again)),
      devices_(devices_of(inputs)),
      random_(RandomState::current(devices_)),
      autocast_(AutocastMode::current(devices_)) {
  for (const torch::Tensor& tensor : inputs) {
    Input input;
    input.requires_grad = tensor.defined() && tensor.requires_grad();
    if (tensor.defined() && !is_free_to_save(tensor)) input.dropped = SavedTensorScope::hooks();
    if (input.dropped) {
      const at::NoGradGuard no_grad;
      input.dropped->call_pack_hook(tensor);
    } else {
      input.kept = tensor;
      input.version = tensor.defined() ? version_of(tensor) : 0;
    }
    inputs_.push_back(std::move(input));
  }
}

SavedTensorScope::Make RecomputeFrame::hooks() {
  return [frame = shared_from_this()] { return std::make_unique<Dropped>(frame); };
}

torch::Tensor RecomputeFrame::take(std::size_t index) {
  if (values_.size() <= index || !values_[index].defined()) run_again();
  return std::move(values_[index]);
}

void RecomputeFrame::run_again() {
  std::vector<torch::Tensor> inputs, leaves;
  for (Input& input : inputs_) {
    const torch::Tensor tensor = input.dropped ? input.dropped->call_unpack_hook() : input.kept;
    if (!input.dropped && tensor.defined() && version_of(tensor) != input.version)
      fail_user(
          "an input of zr::checkpoint was changed in place after the block had run, so the block cannot be recomputed; "
          "change a copy of the input");
    if (!tensor.defined() || is_free_to_save(tensor))
      inputs.push_back(tensor);
    else
      leaves.push_back(inputs.emplace_back(tensor.detach().set_requires_grad(input.requires_grad)));
  }
  values_.clear();
  {
    const at::AutoGradMode grad(true);
    const Restored restored(devices_, random_, autocast_);
    const SavedTensorScope scope([&] { return std::make_unique<Recorded>(values_, leaves); });
    again_(inputs);
  }
  if (values_.size() != dropped_)
    fail_user("the block of zr::checkpoint saved " + std::to_string(values_.size()) +
              " tensors when it was recomputed, but " + std::to_string(dropped_) +
              " in its first run; both runs must execute the same operators, so the block may depend only on its "
              "inputs and the model");
}

}  // namespace zr::host::model
