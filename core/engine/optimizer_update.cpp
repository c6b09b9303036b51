#include "engine/optimizer_update.hpp"

#include "base/error.hpp"
#include "engine/planning.hpp"
#include "update/update.hpp"

namespace zr::host {

OptimizerUpdate::OptimizerUpdate(const StepContext& context, ShardedState& state)
    : context_(context), state_(state), granularity_(granularity_of(context.optimizer)), group_rates_(1, 1.0) {
  for (const GroupConfig& group : context.config().groups()) group_rates_.push_back(group.lr_scale);
}

void OptimizerUpdate::announce(int64_t update) {
  const Instance& optimizer = context_.optimizer;
  if (!context_.optimizer_api().phase) return;
  uint32_t grads = ZR_GRADS_REDUCED;
  CallError error;
  context_.check(context_.optimizer_api().phase(optimizer.self(), update, &grads, &error), error,
                 optimizer.who("phase"));
  if (grads != ZR_GRADS_REDUCED)
    fail_internal(optimizer.who("phase") +
                  " requests local gradients, but its description does not declare that; this is a bug in the plug-in");
}

void OptimizerUpdate::run(const Input& input) {
  const std::vector<Parameter>& parameters = context_.plan.input.parameters;
  std::vector<double> rates(parameters.size());
  for (std::size_t i = 0; i < rates.size(); ++i) rates[i] = input.rate * group_rates_[parameters[i].group];
  UpdateInput all{input.grad_mul, input.number, input.grad_norm, &input.steps, &rates, &input.touched};
  state_.update(input.touched, [&](const std::vector<UpdateSlice>& slices, bool staged) {
    all.staged = staged;
    update(context_.optimizer, granularity_, context_.pool, context_.plan, slices, all);
  });
}

}  // namespace zr::host
