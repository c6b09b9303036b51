#include "zr/recompute.hpp"

#include <ATen/core/grad_mode.h>

#include "model/recompute.hpp"

namespace zr::detail {

struct RecomputeScope::State {
  explicit State(std::shared_ptr<host::model::RecomputeFrame> frame) : first_run(std::move(frame)) {}
  host::model::RecomputeFrame::FirstRun first_run;
};

RecomputeScope::RecomputeScope(std::function<void(const std::vector<torch::Tensor>&)> again,
                               const std::vector<torch::Tensor>& inputs) {
  if (at::GradMode::is_enabled())
    state_ = std::make_unique<State>(std::make_shared<host::model::RecomputeFrame>(std::move(again), inputs));
}

RecomputeScope::~RecomputeScope() = default;

}  // namespace zr::detail
