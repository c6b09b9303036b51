#include "job/early_update_conditions.hpp"

#include <fmt/format.h>

#include "base/dtype.hpp"

namespace zr::host::job {

namespace {
// What the configuration and the optimizers decide, apart from skipped and clipped steps.
std::string obstacle_of_job(const config::JobConfig& config, const plan::PlanInput& input) {
  if (!config.offload().overlap) return "offload.overlap is false";
  for (uint32_t param = 0; param < input.parameters.size(); ++param) {
    if (input.parameters[param].frozen) continue;
    const plan::OptimizerDescription& description = input.description(param);
    if (description.elementwise() && description.ignores_norm) continue;
    return fmt::format("optimizer '{}' {}", input.optimizer_ids[input.parameters[param].optimizer],
                       description.elementwise() ? "may use the gradient norm" : "is not elementwise");
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
  if (config.train().gradient_clipping > 0) return "train.gradient_clipping may clip it";
  if (!never_skips_or_clips(config)) return "train.nonfinite = \"skip\" may skip it";
  return size_of(input.parts() > 1 ? zr_dtype{ZR_F32} : input.weight_dtype) > size_of(input.reduced_grad_dtype)
             ? "gradients.dtype is narrower than the weights"
             : "";
}

bool never_skips_or_clips(const config::JobConfig& config) {
  return config.train().nonfinite == config::NonFiniteRule::stop && !(config.train().gradient_clipping > 0);
}

}  // namespace zr::host::job
