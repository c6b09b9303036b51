#include "engine/gradient_flow.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/host_view.hpp"
#include "job/job_checks.hpp"
#include "update/norm.hpp"

namespace zr::host::engine {

namespace {
std::atomic<int> running_backwards = 0;  // of all engines of this process
}  // namespace

GradientFlow::GradientFlow(const job::StepContext& context, const offload::DiskBackedBuffers* disk_buffers)
    : context_(context),
      source_(context.model),
      strategy_(context.strategy),
      plan_(context.plan),
      comm_(context.comm),
      disk_buffers_(disk_buffers),
      overlap_(context.config().gradients().overlap),
      accumulates_locally_(context.plan.input.accumulates_locally),
      last_micro_(static_cast<uint32_t>(context.plan.input.accumulation) - 1) {
  const std::size_t n = plan_.input.parameters.size();
  delivered_elements_.assign(n, 0);
  has_gradient_.assign(n, 0);
  touched_.assign(n, 0);
  source_.on_gradient([this](uint32_t param) { arrived(param); });
  source_.on_gradient_computed([this](uint32_t param) {
    check_in_backward(param);
    computed_ = true;
  });
  source_.deliver_on_thread(plan_.sharded_parameters().empty());  // else operators communicate during backward too
}

GradientFlow::~GradientFlow() {
  set_in_backward(false);
  source_.drop_computed_gradients();
  source_.on_gradient_computed({});
  source_.on_gradient({});
}

void GradientFlow::report_event(uint32_t kind) {
  const zr_use use = strategy_use();
  context_.call_strategy("event", [&](zr_error* error) { return strategy_.event(kind, &use, error); });
}

void GradientFlow::begin(uint32_t micro, bool contributes, LocalGradients* local) {
  const RecursiveMutexLock lock(context_.use);
  micro_ = micro;
  local_ = local;
  set_in_backward(true);
  computed_ = false;
  contributes_ = contributes;
  std::fill(delivered_elements_.begin(), delivered_elements_.end(), 0);
  std::fill(has_gradient_.begin(), has_gradient_.end(), 0);
  pending_.clear();
  submitted_before_ = submitted_at_last_ = comm_.submitted();
  if (micro == 0) {
    std::fill(touched_.begin(), touched_.end(), 0);
    checks_non_finite_ = checks_next_step_;
    first_non_finite_ = -1;
    if (!step_begun_) report_event(ZR_STEP_BEGIN);
    step_begun_ = true;
  }
}

bool GradientFlow::cancel() {
  source_.drop_computed_gradients();
  const RecursiveMutexLock lock(context_.use);
  set_in_backward(false);
  if (context_.device) context_.device->flush();  // before a repeated backward copies to the same memory
  if (computed_) return false;                    // on a device, it depends on time whether some have been delivered
  if (std::any_of(delivered_elements_.begin(), delivered_elements_.end(), [](int64_t n) { return n > 0; }))
    return false;
  for (uint32_t param = 0; param < delivered_elements_.size(); ++param) source_.drop_gradient(param);
  pending_.clear();
  return true;
}

void GradientFlow::set_in_backward(bool running) {
  if (in_backward_.exchange(running) != running) running_backwards += running ? 1 : -1;
}

void GradientFlow::check_in_backward(uint32_t param) const {
  if (in_backward_) return;
  const std::string& name = plan_.input.parameters[param].name;
  if (running_backwards > 0)
    fail_user(
        fmt::format("the backward() of another zr::Engine computed a gradient for '{}'; call requires_grad_(false) on "
                    "the parameters of this model before the other engine's loss is computed, and "
                    "requires_grad_(true) after its backward()",
                    name));
  fail_user(
      fmt::format("backward() ran outside engine.backward() and computed a gradient for '{}'; call "
                  "engine.backward(loss) instead of loss.backward()",
                  name));
}

void GradientFlow::arrived(uint32_t param) {
  const RecursiveMutexLock lock(context_.use);
  const std::string& name = plan_.input.parameters[param].name;
  check_in_backward(param);
  if (delivered_elements_[param] > 0)
    fail_user(
        fmt::format("'{}' received a second gradient in one backward after its first was handed to the strategy: a "
                    "backward() ran inside this backward; set gradients.overlap = false",
                    name));
  submitted_at_last_ = comm_.submitted();
  if (has_gradient_[param]++) return;  // already waiting; the model has added this gradient to the first one
  const bool waits = !overlap_ || strategy_.part_of(param) != part_;
  if (waits || !deliver(param)) pending_.push_back(param);
  if (overlap_ && !pending_.empty()) deliver_pending();
}

bool GradientFlow::deliver(uint32_t param) {
  const plan::Parameter& parameter = plan_.input.parameters[param];
  int64_t& delivered = delivered_elements_[param];
  if (is_local()) {
    if (parameter.count > 0) deliver_local(param);
    delivered = parameter.count;
    source_.drop_gradient(param);
    return true;
  }
  const zr_use use = strategy_use();
  while (delivered < parameter.count) {
    zr_view dst{};
    CallError error;
    int64_t first = delivered;
    const zr_code code =
        context_.call_in_order(&error, [&] { return strategy_.grad_destination(param, &first, &use, &dst, &error); });
    if (code == ZR_AGAIN) {
      if (!accumulates_locally_) return false;
      job::fail_not_held(strategy_.component().table->id, parameter.name);
    }
    context_.check(code, error, strategy_.call_text("grad_destination"));
    if (!dst.data || dst.count <= 0 || dst.count > parameter.count - delivered || first < 0 ||
        dst.count > parameter.count - first || dst.dtype != plan_.input.gradient_dtype_of(param))
      fail_internal(fmt::format("{} returned an invalid destination for '{}': {} elements from element {}{}",
                                strategy_.call_text("grad_destination"), parameter.name, dst.count, first,
                                dst.data ? "" : " at address 0"));
    if (const std::string problem = view_problem_on(context_.memory_device(), "the destination", dst); !problem.empty())
      fail_plugin_bug(fmt::format("{} for '{}'", strategy_.call_text("grad_destination"), parameter.name), problem);
    if (disk_buffers_ && disk_buffers_->holds(dst.data))
      fail_user(fmt::format(
          "offload.gradients: strategy '{}' accumulates gradients in its reduced gradients, which are on a disk tier "
          "and cannot be written in place; choose a strategy with separate bucket buffers, or a tier in memory",
          strategy_.component().table->id));
    copy_or_add(param, first, dst);
    const auto ready = [&] { return strategy_.grad_ready(param, first, dst.count, &use, &error); };
    if (!accumulates_locally_ || micro_ == last_micro_)
      context_.check(context_.call_in_order(&error, ready), error, strategy_.call_text("grad_ready"));
    delivered += dst.count;
  }
  source_.drop_gradient(param);
  return true;
}

void GradientFlow::deliver_local(uint32_t param) {
  const bool copies = micro_ == 0 && has_gradient_[param] && contributes_;
  const zr_view gradient = copies ? source_.gradient(param) : zr_view{};
  if (gradient.data) return local_->set(param, gradient);
  copy_or_add(param, 0, local_->gradient(param));
  local_->written(param);
}

// Writes the gradient, or adds it to those of earlier micro-steps if these are held. A missing gradient adds nothing.
void GradientFlow::copy_or_add(uint32_t param, int64_t first, const zr_view& dst) {
  const bool adds = (accumulates_locally_ || is_local()) && micro_ > 0;
  if (!has_gradient_[param] || !contributes_) {
    if (!adds) clear(dst);
    return;
  }
  adds ? source_.add_gradient(param, first, dst) : source_.copy_gradient(param, first, dst);
  const bool earlier = first_non_finite_ < 0 || param < first_non_finite_;
  if (checks_non_finite_ && !is_local() && earlier && count_non_finite(dst) > 0) first_non_finite_ = param;
}

void GradientFlow::clear(const zr_view& gradients) const {
  if (context_.device) return context_.device->zero(gradients);
  std::memset(gradients.data, 0, static_cast<std::size_t>(gradients.count * size_of(gradients.dtype)));
}

int64_t GradientFlow::count_non_finite(const zr_view& gradients) const {
  return context_.device ? context_.device->count_non_finite(gradients) : update::count_non_finite(gradients);
}

void GradientFlow::deliver_pending() {
  for (bool progress = true; progress && !pending_.empty();) {
    progress = false;
    for (std::size_t i = 0; i < pending_.size();) {
      const uint32_t param = pending_[i];
      const int64_t before = delivered_elements_[param];
      if (strategy_.part_of(param) != part_) {
        ++i;
      } else if (deliver(param)) {
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
        progress = true;
      } else {
        progress |= delivered_elements_[param] != before;
        ++i;
      }
    }
  }
}

void GradientFlow::end() {
  const RecursiveMutexLock lock(context_.use);
  set_in_backward(false);
  step_begun_ = false;
  for (std::size_t i = 0; i < has_gradient_.size(); ++i) touched_[i] |= contributes_ && has_gradient_[i];
  for (uint32_t part = 0; part < strategy_.parts(); ++part) end_part(part);
  part_ = 0;
  if (context_.device) context_.device->flush();  // frees the gradients
  collectives_ += comm_.submitted() - submitted_before_;
  collectives_early_ += submitted_at_last_ - submitted_before_;
}

void GradientFlow::end_part(uint32_t part) {
  part_ = part;
  // Last parameters first, as backward visits them: strategies fill buckets from the end.
  pending_.clear();
  for (auto param = static_cast<uint32_t>(delivered_elements_.size()); param-- > 0;) {
    const plan::Parameter& parameter = plan_.input.parameters[param];
    if (strategy_.part_of(param) == part && !parameter.frozen &&
        (delivered_elements_[param] < parameter.count || parameter.count == 0))
      pending_.push_back(param);
  }
  deliver_pending();
  if (!pending_.empty())
    fail_internal(fmt::format("{} has no free bucket slot for '{}' although no bucket is being filled",
                              strategy_.call_text("grad_destination"), plan_.input.parameters[pending_.front()].name));
  if (accumulates_locally_ && micro_ != last_micro_) return;
  if (context_.device) context_.device->flush();  // copies to the destinations
  const zr_use use = strategy_use();
  context_.call_strategy("event",
                         [&](zr_error* error) { return strategy_.event_of(part, ZR_BACKWARD_END, &use, error); });
}

}  // namespace zr::host::engine
