#include "zr/checkpoint.hpp"

#include <ATen/core/grad_mode.h>

#include "model/recompute.hpp"

namespace zr::detail {

struct CheckpointScope::State {
  explicit State(const std::shared_ptr<host::Frame>& frame) : scope(frame->hooks()) {}
  host::SavedScope scope;
};

CheckpointScope::CheckpointScope(std::function<void(const std::vector<torch::Tensor>&)> again,
                                 const std::vector<torch::Tensor>& inputs) {
  if (at::GradMode::is_enabled())
    state_ = std::make_unique<State>(std::make_shared<host::Frame>(std::move(again), inputs));
}

CheckpointScope::~CheckpointScope() = default;

}  // namespace zr::detail
