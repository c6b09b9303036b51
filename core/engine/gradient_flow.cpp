#include "engine/gradient_flow.hpp"

#include <algorithm>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "update/norm.hpp"

namespace zr::host::engine {

GradientFlow::GradientFlow(const StepContext& context, const offload::DiskBackedBuffers* disk_buffers)
    : context_(context),
      model_(context.model),
      strategy_(context.strategy),
      api_(&context.strategy_api()),
      plan_(context.plan),
      comm_(context.comm),
      disk_buffers_(disk_buffers),
      overlap_(context.config().gradients().overlap),
      hold_(context.plan.input.hold_gradients),
      last_(static_cast<uint32_t>(context.plan.input.accumulation) - 1) {
  const std::size_t n = plan_.input.parameters.size();
  taken_.assign(n, 0);
  present_.assign(n, 0);
  touched_.assign(n, 0);
  model_.on_gradient([this](uint32_t param) { arrived(param); });
}

GradientFlow::~GradientFlow() { model_.on_gradient({}); }

void GradientFlow::event(uint32_t kind) {
  CallError error;
  context_.check(api_->event(strategy_.self(), kind, seen_micro(), &error), error, strategy_.call_text("event"));
}

void GradientFlow::begin(uint32_t micro, bool counts) {
  const RecursiveMutexLock lock(context_.use);
  micro_ = micro;
  active_ = true;
  counts_ = counts;
  std::fill(taken_.begin(), taken_.end(), 0);
  std::fill(present_.begin(), present_.end(), 0);
  waiting_.clear();
  submitted_before_ = submitted_at_last_ = comm_.submitted();
  if (micro == 0) {
    std::fill(touched_.begin(), touched_.end(), 0);
    watches_ = watches_next_;
    first_non_finite_ = -1;
    if (!step_begun_) event(ZR_STEP_BEGIN);
    step_begun_ = true;
  }
}

bool GradientFlow::cancel() {
  const RecursiveMutexLock lock(context_.use);
  active_ = false;
  if (std::any_of(taken_.begin(), taken_.end(), [](int64_t n) { return n > 0; })) return false;
  for (uint32_t param = 0; param < taken_.size(); ++param) model_.drop_gradient(param);
  waiting_.clear();
  return true;
}

void GradientFlow::arrived(uint32_t param) {
  const RecursiveMutexLock lock(context_.use);
  const std::string& name = plan_.input.parameters[param].name;
  if (!active_)
    fail_user("backward() ran outside engine.backward() and computed a gradient for '" + name +
              "'; call engine.backward(loss) instead of loss.backward()");
  if (taken_[param] > 0)
    fail_user(
        "'" + name +
        "' received a second gradient in one backward after its first was handed to the strategy: a backward() ran "
        "inside this backward; set gradients.overlap = false");
  submitted_at_last_ = comm_.submitted();
  if (present_[param]++) return;  // already waiting; the model has added this gradient to the first one
  if (!overlap_ || !deliver(param)) waiting_.push_back(param);
  if (overlap_ && !waiting_.empty()) deliver_waiting();
}

bool GradientFlow::deliver(uint32_t param) {
  const plan::Parameter& parameter = plan_.input.parameters[param];
  int64_t& taken = taken_[param];
  while (taken < parameter.count) {
    zr_view dst{};
    CallError error;
    int64_t first = taken;
    const zr_code code = api_->grad_destination(strategy_.self(), param, &first, seen_micro(), &dst, &error);
    if (code == ZR_AGAIN) {
      if (!hold_) return false;
      fail_user("strategy '" + std::string(strategy_.component().table->id) +
                "' has no buffer to hold the gradient of '" + parameter.name +
                "' across micro-steps, which gradients.reduce = \"last_micro_step\" requires; set gradients.reduce = "
                "\"each_micro_step\", or choose another strategy");
    }
    context_.check(code, error, strategy_.call_text("grad_destination"));
    if (dst.count <= 0 || dst.count > parameter.count - taken || first < 0 || dst.count > parameter.count - first ||
        dst.dtype != plan_.input.communicated_grad_dtype)
      fail_internal(strategy_.call_text("grad_destination") + " returned an invalid destination for '" +
                    parameter.name + "': " + std::to_string(dst.count) + " elements from element " +
                    std::to_string(first));
    if (disk_buffers_ && disk_buffers_->holds(dst.data))
      fail_user("offload.gradients: strategy '" + std::string(strategy_.component().table->id) +
                "' accumulates gradients in its reduced gradients, which are on a disk tier and cannot be written in "
                "place; choose a strategy with separate bucket buffers, or a tier in memory");
    write(param, first, dst);
    if (!hold_ || micro_ == last_)
      context_.check(api_->grad_ready(strategy_.self(), param, first, dst.count, seen_micro(), &error), error,
                     strategy_.call_text("grad_ready"));
    taken += dst.count;
  }
  model_.drop_gradient(param);
  return true;
}

// Writes the gradient, or adds it to those of earlier micro-steps if these are held. A missing gradient adds nothing.
void GradientFlow::write(uint32_t param, int64_t first, const zr_view& dst) {
  const bool adds = hold_ && micro_ > 0;
  if (!present_[param] || !counts_) {
    if (!adds) std::memset(dst.data, 0, static_cast<std::size_t>(dst.count * size_of(dst.dtype)));
    return;
  }
  adds ? model_.add_gradient(param, first, dst) : model_.copy_gradient(param, first, dst);
  const bool earlier = first_non_finite_ < 0 || param < first_non_finite_;
  if (watches_ && earlier && update::count_non_finite(dst) > 0) first_non_finite_ = param;
}

void GradientFlow::deliver_waiting() {
  for (bool progress = true; progress && !waiting_.empty();) {
    progress = false;
    for (std::size_t i = 0; i < waiting_.size();) {
      const uint32_t param = waiting_[i];
      const int64_t before = taken_[param];
      if (deliver(param)) {
        waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
        progress = true;
      } else {
        progress |= taken_[param] != before;
        ++i;
      }
    }
  }
}

void GradientFlow::end() {
  const RecursiveMutexLock lock(context_.use);
  active_ = step_begun_ = false;
  for (std::size_t i = 0; i < present_.size(); ++i) touched_[i] |= counts_ && present_[i];
  // Last parameters first, as backward visits them: strategies fill buckets from the end.
  waiting_.clear();
  for (auto param = static_cast<uint32_t>(taken_.size()); param-- > 0;) {
    const plan::Parameter& parameter = plan_.input.parameters[param];
    if (!parameter.frozen && (taken_[param] < parameter.count || parameter.count == 0)) waiting_.push_back(param);
  }
  deliver_waiting();
  if (!waiting_.empty())
    fail_internal(strategy_.call_text("grad_destination") + " has no free bucket slot for '" +
                  plan_.input.parameters[waiting_.front()].name + "' although no bucket is being filled");
  if (!hold_ || micro_ == last_) event(ZR_BACKWARD_END);
  collectives_ += comm_.submitted() - submitted_before_;
  collectives_early_ += submitted_at_last_ - submitted_before_;
}

}  // namespace zr::host::engine
