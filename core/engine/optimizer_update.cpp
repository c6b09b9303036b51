#include "engine/optimizer_update.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstdint>

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

double OptimizerUpdate::learning_rate(int64_t index) const {
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

void OptimizerUpdate::run(const Input& input) {
  const std::vector<plan::Parameter>& parameters = context_.plan.input.parameters;
  std::vector<double> rates(parameters.size());
  for (std::size_t i = 0; i < rates.size(); ++i) rates[i] = input.rate * group_rates_[parameters[i].group];
  update::UpdateInput update_input{input.grad_mul, input.number, input.grad_norm, &input.steps, &rates, &input.touched};
  update_input.sums = {[this](uint32_t param, int64_t first) { return sums_.partial(param, first); },
                       [this](uint32_t param) { return sums_.totals(param); }};
  for (uint32_t pass = 0; pass < sums_.passes(); ++pass) {
    std::vector<char> in_pass = input.touched;
    for (uint32_t i = 0; i < in_pass.size(); ++i)
      if (context_.plan.input.description(i).sums.size() <= pass) in_pass[i] = 0;
    update_input.touched = &in_pass;
    sums_.begin(pass);
    state_.update(in_pass, [&](const std::vector<update::UpdateSlice>& slices, bool copies_operands) {
      update_input.copies_operands = copies_operands;
      update::add_up(optimizers_, context_.pool, context_.plan, slices, update_input, pass);
    });
    sums_.end(in_pass);
  }
  update_input.touched = &input.touched;
  state_.update(input.touched, [&](const std::vector<update::UpdateSlice>& slices, bool copies_operands) {
    update_input.copies_operands = copies_operands;
    update::update(optimizers_, context_.pool, context_.plan, slices, update_input);
  });
}

}  // namespace zr::host::engine
