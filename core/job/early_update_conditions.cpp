#include "job/early_update_conditions.hpp"

#include <fmt/format.h>

#include "base/dtype.hpp"

namespace zr::host::job {

namespace {
// What the configuration and the optimizers decide, apart from speculation.
std::string obstacle_of_job(const config::JobConfig& config, const plan::PlanInput& input) {
  if (!config.offload().overlap) return "offload.overlap is false";
  for (uint32_t param = 0; param < input.parameters.size(); ++param) {
    if (input.parameters[param].frozen) continue;
    const plan::OptimizerDescription& description = input.description(param);
    const bool can_be_undone = !description.has_globals || updates_in_place(config);
    if (description.elementwise() && description.ignores_norm && can_be_undone) continue;
    return fmt::format("optimizer '{}' {}", input.optimizer_ids[input.parameters[param].optimizer],
                       !description.elementwise()  ? "is not elementwise"
                       : !description.ignores_norm ? "may use the gradient norm"
                                                   : "has state of its own, which cannot be undone");
  }
  return "";
}
}  // namespace

std::string early_update_obstacle(const config::JobConfig& config, const plan::MemoryPlan& plan) {
  const plan::PlanInput& input = plan.input;
  if (!plan.has_offloaded_states()) return "no optimizer state is on a tier";
  if (plan.on_device) return "gradients are in memory of the device";
  if (std::string reason = obstacle_of_job(config, input); !reason.empty()) return reason;
  for (const plan::Buffer& buffer : plan.rank_plan.buffers)
    if (!input.tiers[static_cast<std::size_t>(plan.tier_of(buffer))].in_memory())
      return "reduced gradients or weights are on a disk";
  if (updates_in_place(config))
    return size_of(input.parts() > 1 ? zr_dtype{ZR_F32} : input.weight_dtype) > size_of(input.reduced_grad_dtype)
               ? "gradients.dtype is narrower than the weights"
               : "";
  if (plan.placement.speculates) return "";
  const char* const why = config.train().gradient_clipping > 0 ? "train.gradient_clipping may clip it"
                                                               : "train.nonfinite = \"skip\" may skip it";
  if (config.offload().speculate == config::SpeculateRule::never)
    return fmt::format("{}, and offload.speculate is \"never\"", why);
  return fmt::format("{}, and memory to undo it {}", why,
                     config.memory().host_budget > 0 ? "does not fit in memory.host_budget"
                                                     : "needs memory.host_budget, or offload.speculate = \"always\"");
}

bool updates_in_place(const config::JobConfig& config) {
  return config.train().nonfinite == config::NonFiniteRule::stop && !(config.train().gradient_clipping > 0);
}

plan::Speculation speculation_of(const config::JobConfig& config, const plan::PlanInput& input) {
  const config::SpeculateRule rule = config.offload().speculate;
  if (updates_in_place(config) || rule == config::SpeculateRule::never || !obstacle_of_job(config, input).empty())
    return plan::Speculation::none;
  return rule == config::SpeculateRule::always ? plan::Speculation::always : plan::Speculation::if_it_fits;
}

}  // namespace zr::host::job
