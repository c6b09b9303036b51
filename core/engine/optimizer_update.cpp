#include "engine/optimizer_update.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "job/all_gather.hpp"
#include "job/early_update_conditions.hpp"
#include "update/schedule.hpp"
#include "update/update.hpp"

namespace zr::host::engine {

OptimizerUpdate::OptimizerUpdate(const job::StepContext& context, state::ShardedState& state)
    : context_(context), state_(state), sums_(context), group_rates_(1, 1.0) {
  for (std::size_t i = 0; i < context.optimizers.size(); ++i)
    optimizers_.push_back({&context.optimizers[i], context.optimizers.partial_sums(i)});
  for (const config::GroupConfig& group : context.config().groups()) group_rates_.push_back(group.lr_scale);
}

void OptimizerUpdate::allow_early(const Parts& parts, Trace* trace) {
  if (context_.plan.input.tiers.size() == 1) return;
  const config::JobConfig& config = context_.config();
  if (!job::never_skips_or_clips(config)) return;
  const bool suits = job::early_update_obstacle(config, context_.plan).empty();
  bool any = false;
  for (const char other : job::all_gather(context_.comm, static_cast<char>(suits), "early update")) any |= other != 0;
  if (!any) return;
  parts_.emplace(parts);
  parts.flow.on_gather([&progress = parts.progress](const std::string& call) { progress.check_no_early_update(call); });
  if (!suits) return;
  early_.emplace(context_, state_, optimizers_, trace);
  const RecursiveMutexLock lock(context_.use);
  parts.step_sync.norm().on_final(
      [this](const void* first, int64_t elements, bool finite) { early_->gradients_reduced(first, elements, finite); });
  parts.step_sync.on_collective([this](const zr_view& src) { early_->collective_read(src); });
}

OptimizerUpdate::~OptimizerUpdate() {
  if (!parts_) return;
  const RecursiveMutexLock lock(context_.use);  // a collective may complete on another thread
  parts_->step_sync.norm().on_final({});
  parts_->step_sync.on_collective({});
  parts_->flow.on_gather({});
}

// A backward that failed before its first gradient is repeated with what the ranks have exchanged.
void OptimizerUpdate::begin_early() {
  is_early_ = false;  // of a step that was rejected
  if (!parts_ || edits_gradients()) return;
  TrainingProgress& progress = parts_->progress;
  const double weight = progress.weights().back();
  if (begun_ && weight != begun_->weight)
    fail_user(fmt::format(
        "engine.backward(loss, weight): the weight is {}, but the failed call that this one repeats had {}; "
        "pass the same weight, or set offload.overlap = false",
        shortest(weight), shortest(begun_->weight)));
  if (!begun_) {
    context_.model.check_scopes("engine.backward()");
    StepSync::Totals totals = parts_->step_sync.totals(progress.weights(), parts_->gradients.touched());
    const bool has_weight = totals.weight > 0 && std::isfinite(totals.weight);  // if not, step() rejects the step
    const double rate = has_weight ? next_learning_rate(progress.updates(), "engine.backward()") : 0;
    begun_ = {has_weight, weight, totals.divisor * progress.loss_scale().value(), rate, std::move(totals.touched)};
    if (has_weight) progress.begin_early_update();
  }
  if (!early_ || !begun_->has_weight) return;
  if (!context_.model.may_be_written_untracked().empty()) return;  // weights are compared with masters at the end
  parts_->monitor.collect_writes();
  if (parts_->monitor.written_parameter()) return;  // libtorch does not count writes to a tensor of the program
  is_early_ = true;
  std::vector<int64_t> steps = progress.param_steps();
  for (int64_t& step : steps) ++step;
  early_->begin(
      {static_cast<float>(1 / begun_->divisor), progress.updates() + 1, std::move(steps), rates(begun_->rate)},
      [gradients = &parts_->gradients, touched = begun_->touched](uint32_t param) {
        return touched[param] || gradients->receives(param);
      });
}

void OptimizerUpdate::cancel_early() {
  if (std::exchange(is_early_, false)) abandon_early();
}

// Waits until this rank's worker is idle, and keeps its failure.
void OptimizerUpdate::abandon_early() {
  if (const std::exception_ptr failure = early_->abandon()) early_failure_ = failure;
}

void OptimizerUpdate::before_access(const std::string& call) {
  if (!parts_) return;
  parts_->progress.check_broken_off();
  if (begun_) parts_->progress.check_no_early_update(call);
}

// If updates may begin early on any rank, a failure goes through the ranks' exchange on all of them.
void OptimizerUpdate::read_ahead() {
  if (is_early_) return;
  if (!parts_) return state_.states().read_ahead(state_.slices());
  try {
    state_.check_tiers();
    state_.states().read_ahead(state_.slices());
  } catch (...) {
    keep_failure();
  }
}

void OptimizerUpdate::end_early() {
  begun_.reset();
  if (!parts_) return;
  try {
    if (is_early_) early_->finish();
    state_.check_tiers();
    if (!is_early_) return;
    const std::optional<uint32_t> written = parts_->monitor.written_parameter();
    if (early_->elements_updated() == 0 || !written) return;
    fail_user(
        fmt::format("engine.step(): the program wrote, or may have written, to weights ('{}') after the step's last "
                    "engine.backward() had begun, but a part of the update ran during it; training cannot continue: "
                    "resume from the last checkpoint; write before the forward of that micro-batch or after "
                    "engine.step(), or set offload.overlap = false",
                    context_.plan.input.parameters[*written].name));
  } catch (...) {
    keep_failure();
  }
}

// Call it in a catch block.
void OptimizerUpdate::keep_failure() {
  if (!early_failure_) early_failure_ = std::current_exception();
}

void OptimizerUpdate::step_failed() {
  if (!parts_) return;
  TrainingProgress& progress = parts_->progress;
  if (is_early_) abandon_early();  // the step may have failed before end_early()
  if (!progress.updates_early() && !early_failure_) return;
  progress.break_off(
      fmt::format("training stopped in step {}, because engine.step() failed after a part of the update had run during "
                  "backward; resume from the last checkpoint",
                  progress.step() + 1));
}

void OptimizerUpdate::check_early(int failed_rank) const {
  if (failed_rank < 0) return;
  TrainingProgress& progress = parts_->progress;
  const int64_t step = progress.step() + 1;
  progress.break_off(
      fmt::format("training stopped in step {}, because its update failed on rank {}; resume from the last checkpoint",
                  step, failed_rank));
  if (early_failure_) std::rethrow_exception(early_failure_);
  throw PeerFailedError(
      fmt::format("engine.step(): the update of step {} failed on rank {}; see that rank's error, then resume from the "
                  "last checkpoint",
                  step, failed_rank));
}

double OptimizerUpdate::learning_rate(int64_t index) const {
  return begun_ && begun_->has_weight ? begun_->rate : next_learning_rate(index, "engine.step()");
}

double OptimizerUpdate::next_learning_rate(int64_t index, const char* call) const {
  if (!schedule_) return host::update::learning_rate(context_.config(), index);
  struct RankRate {
    double rate = 0;
    int64_t failed = 0;
  } own_rate;
  const std::exception_ptr failure = exception_of([&] { own_rate.rate = schedule_(index); });
  own_rate.failed = failure != nullptr;
  std::vector<double> rates;
  for (const RankRate& rank_rate : job::all_gather(context_.comm, own_rate, "learning rate")) {
    if (rank_rate.failed && !failure)
      throw PeerFailedError(
          fmt::format("{}: the function passed to engine.set_schedule() failed on rank {} for update {}; nothing was "
                      "changed; see that rank's error",
                      call, rates.size(), index));
    rates.push_back(rank_rate.rate);
  }
  if (failure) std::rethrow_exception(failure);
  const double rate = own_rate.rate;
  for (std::size_t rank = 0; rank < rates.size(); ++rank) {
    const std::string problem =
        fmt::format("{}: the learning rate of update {}, which the program set, is {} on rank {}", call, index,
                    shortest(rates[rank]), rank);
    if (!(rates[rank] >= 0) || !std::isfinite(rates[rank]))
      fail_user(problem + ", but it must be finite and at least 0; correct engine.set_lr() or engine.set_schedule()");
    if (std::bit_cast<uint64_t>(rates[rank]) != std::bit_cast<uint64_t>(rates[0]))
      fail_user(
          fmt::format("{} and {} on rank 0; make the function passed to engine.set_schedule() depend only on the index "
                      "of the update",
                      problem, shortest(rates[0])));
  }
  return rate;
}

std::vector<double> OptimizerUpdate::rates(double rate) const {
  const std::vector<plan::Parameter>& parameters = context_.plan.input.parameters;
  std::vector<double> rates(parameters.size());
  for (std::size_t i = 0; i < rates.size(); ++i) rates[i] = rate * group_rates_[parameters[i].group];
  return rates;
}

void OptimizerUpdate::run(const Input& input) {
  const std::vector<double> rates = this->rates(input.rate);
  state::ShardedState::Updated updated;
  elements_early_ = 0;
  if (std::exchange(is_early_, false)) {
    updated = early_->adopt();
    elements_early_ = early_->elements_early();
    bytes_early_ += early_->bytes_early();
    adopted_ += elements_early_ > 0;
  }
  update::UpdateInput update_input{input.grad_mul, input.number, input.grad_norm, &input.steps, &rates, &input.touched};
  update_input.sums = {[this](uint32_t param, int64_t first) { return sums_.partial(param, first); },
                       [this](uint32_t param) { return sums_.totals(param); }};
  for (uint32_t pass = 0; pass < sums_.passes(); ++pass) {
    std::vector<char> in_pass = input.touched;
    for (uint32_t i = 0; i < in_pass.size(); ++i)
      if (context_.plan.input.description(i).sums.size() <= pass) in_pass[i] = 0;
    update_input.touched = &in_pass;
    sums_.begin(pass);
    state_.for_each_slice_in_memory(in_pass, {}, [&](const std::vector<update::UpdateSlice>& slices) {
      update::add_up(optimizers_, context_.pool, context_.plan, slices, update_input, pass);
    });
    sums_.end(in_pass);
  }
  update_input.touched = &input.touched;
  state_.for_each_slice_in_memory(input.touched, updated, [&](const std::vector<update::UpdateSlice>& slices) {
    const bool on_device = !slices.empty() && slices.front().grad.device.type != ZR_DEVICE_CPU;
    if (on_device)
      update::update_on_device(optimizers_, *context_.device, context_.plan, slices, update_input);
    else
      update::update(optimizers_, context_.pool, context_.plan, slices, update_input);
  });
}

void OptimizerUpdate::skip() {
  elements_early_ = 0;
  if (std::exchange(is_early_, false) && early_->elements_updated() > 0)
    fail_internal("a step whose update began during backward cannot be skipped");
}

}  // namespace zr::host::engine
