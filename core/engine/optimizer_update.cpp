#include "engine/optimizer_update.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/all_gather.hpp"
#include "update/schedule.hpp"
#include "update/update.hpp"

namespace zr::host::engine {

OptimizerUpdate::OptimizerUpdate(const StepContext& context, ShardedState& state)
    : context_(context), state_(state), sums_(context), group_rates_(1, 1.0) {
  for (std::size_t i = 0; i < context.optimizers.size(); ++i)
    optimizers_.push_back({&context.optimizers[i], context.optimizers.partial_sums(i)});
  for (const config::GroupConfig& group : context.config().groups()) group_rates_.push_back(group.lr_scale);
}

void OptimizerUpdate::allow_early(const Parts& parts, Trace* trace) {
  if (!EarlyUpdate::obstacle(context_.config(), context_.plan).empty()) return;
  parts_.emplace(parts);
  early_.emplace(context_, state_, optimizers_, trace);
  parts.step_sync.norm().on_final(
      [this](const void* first, int64_t elements, bool finite) { early_->gradients_reduced(first, elements, finite); });
  parts.step_sync.on_collective([this](const zr_view& src) { early_->collective_read(src); });
}

OptimizerUpdate::~OptimizerUpdate() {
  if (!parts_) return;
  parts_->step_sync.norm().on_final({});
  parts_->step_sync.on_collective({});
}

// A backward that failed before its first gradient is repeated with what the ranks have exchanged.
void OptimizerUpdate::begin_early() {
  if (!early_ || edits_gradients()) return;
  TrainingProgress& progress = parts_->progress;
  const double weight = progress.weights().back();
  if (has_begun_) {
    if (weight == begun_weight_) return;
    fail_user(fmt::format(
        "engine.backward(loss, weight): the weight is {}, but the failed call that this one repeats had {}; "
        "pass the same weight, or set offload.overlap = false",
        shortest(weight), shortest(begun_weight_)));
  }
  is_early_ = false;  // of a step that was rejected
  const StepSync::Totals totals = parts_->step_sync.totals(progress.weights(), parts_->gradients.touched());
  const double divisor = totals.weight * progress.loss_scale().value();
  if (!(totals.weight > 0) || !std::isfinite(totals.weight)) return;  // the end of the step reports it
  begun_rate_ = next_learning_rate(progress.updates());
  begun_weight_ = weight;
  has_begun_ = true;
  if (!context_.model.may_be_written_untracked().empty()) return;  // weights are compared with masters at the end
  parts_->monitor.collect_writes();
  is_early_ = true;
  std::vector<int64_t> steps = progress.param_steps();
  for (int64_t& step : steps) ++step;
  early_->begin({static_cast<float>(1 / divisor), progress.updates() + 1, std::move(steps), rates(begun_rate_)},
                [gradients = &parts_->gradients, touched = totals.touched](uint32_t param) {
                  return touched[param] || gradients->touches(param);
                });
}

void OptimizerUpdate::end_early() {
  has_begun_ = false;
  if (!is_early_) return;
  early_->finish();
  if (parts_->monitor.has_written())
    fail_user(
        "engine.step(): the program wrote to weights after the step's last engine.backward() had begun, but a part of "
        "the update ran during it; write before that call or after engine.step(), or set offload.overlap = false");
}

double OptimizerUpdate::learning_rate(int64_t index) const {
  return has_begun_ ? begun_rate_ : next_learning_rate(index);
}

double OptimizerUpdate::next_learning_rate(int64_t index) const {
  if (!schedule_) return host::update::learning_rate(context_.config(), index);
  struct RankRate {
    double rate = 0;
    int64_t failed = 0;
  } own_rate;
  std::exception_ptr failure;
  try {
    own_rate.rate = schedule_(index);
  } catch (...) {
    failure = std::current_exception();
    own_rate.failed = 1;
  }
  std::vector<double> rates;
  for (const RankRate& rank_rate : all_gather(context_.comm, own_rate, "learning rate")) {
    if (rank_rate.failed && !failure)
      throw PeerFailedError(
          fmt::format("engine.step(): the function passed to engine.set_schedule() failed on rank {} for update {}; "
                      "nothing was changed; see that rank's error",
                      rates.size(), index));
    rates.push_back(rank_rate.rate);
  }
  if (failure) std::rethrow_exception(failure);
  const double rate = own_rate.rate;
  for (std::size_t rank = 0; rank < rates.size(); ++rank) {
    const std::string problem =
        fmt::format("engine.step(): the learning rate of update {}, which the program set, is {} on rank {}", index,
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
  ShardedState::Updated updated;
  if (std::exchange(is_early_, false)) {
    updated = early_->adopt();
    if (early_->elements_early() > 0) parts_->progress.consume_gradients();
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
    state_.update(in_pass, {}, [&](const std::vector<update::UpdateSlice>& slices, bool copies_operands) {
      update_input.copies_operands = copies_operands;
      update::add_up(optimizers_, context_.pool, context_.plan, slices, update_input, pass);
    });
    sums_.end(in_pass);
  }
  update_input.touched = &input.touched;
  state_.update(input.touched, updated, [&](const std::vector<update::UpdateSlice>& slices, bool copies_operands) {
    update_input.copies_operands = copies_operands;
    update::update(optimizers_, context_.pool, context_.plan, slices, update_input);
  });
}

}  // namespace zr::host::engine
