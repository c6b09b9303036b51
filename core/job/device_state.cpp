#include "job/device_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/device_memory.hpp"
#include "base/text.hpp"
#include "checkpoint/save.hpp"
#include "job/plan_inputs.hpp"

namespace zr::host::job {

namespace {
// Whether the library is in the folder of plug-ins for this type of device.
bool is_for_device(const plugin::Component& component, const std::string& device) {
  return component.file.parent_path().filename() == device.substr(0, device.find(':'));
}

// By parameter: not 0 if it has states in memory of the device, which a library for the device updates.
std::vector<char> have_states_on_device(const plan::MemoryPlan& plan) {
  const plan::RankPlan& rank_plan = plan.rank_plan;
  std::vector<char> have(plan.input.parameters.size(), !plan.has_offloaded_states());
  for (std::size_t i = 0; i < rank_plan.reduced_gradients.size(); ++i) {
    const plan::Piece& piece = rank_plan.reduced_gradients[i];
    const int64_t first = rank_plan.state_offset[i];
    for (const plan::StateRange& range : plan.placement.states)
      if (range.tier == 0 && first < range.first + range.count && range.first < first + piece.count)
        have[piece.param] = 1;
  }
  return have;
}
}  // namespace

std::string device_obstacle(const plan::MemoryPlan& plan, uint64_t stream_types, const Optimizers& optimizers,
                            const plugin::Instance* communicator, int32_t device_type) {
  const uint64_t type = uint64_t{1} << device_type;
  if (communicator && !(comm::stream_types_of(*communicator) & type))
    return fmt::format("communicator '{}' ({}) exchanges host memory only", communicator->component().table->id,
                       communicator->component().file.string());
  if (plan.placement.reduced_gradients != 0 || plan.placement.shards != 0)
    return "offload.gradients or offload.parameters selects a tier for a part";
  if (plan.input.reduced_grad_dtype != ZR_F32) return "gradients.dtype is not fp32";
  if (!(stream_types & type)) return "the strategy does not accept memory of the device";
  // Blocks of complete tensors would be updated one after the other, each on few threads.
  constexpr int64_t kLargestCut = int64_t{64} << 10;
  std::set<std::size_t> on_device;  // optimizers that must have a library for the device
  const std::vector<char> have_states_there = have_states_on_device(plan);
  for (uint32_t i = 0; i < plan.input.parameters.size(); ++i) {
    const plan::OptimizerDescription& description = plan.input.description(i);
    const std::size_t which = plan.input.parameters[i].optimizer;
    const bool is_there = have_states_there[i] != 0;
    if (!is_there && !description.sums.empty())
      return fmt::format("optimizer '{}' ({}) adds up sums over parameters, in host memory", optimizers.id(which),
                         optimizers[which].component().file.string());
    if ((is_there && !(description.stream_types & type)) || !description.sums.empty() || description.needs != 0)
      return fmt::format("optimizer '{}' ({}) updates host memory only", optimizers.id(which),
                         optimizers[which].component().file.string());
    if (!is_there && !plan.input.parameters[i].frozen && plan.input.cut_block(i) > kLargestCut)
      return fmt::format(
          "states are on a tier and optimizer '{}' updates complete tensors or rows of more than {} elements",
          optimizers.id(which), kLargestCut);
    if (is_there) on_device.insert(which);
  }
  if (plan.has_offloaded_states() && !optimizers.on_device(0))
    return fmt::format("optimizer '{}' ({}) has no library for the device, which adds up the gradient norm",
                       optimizers.id(0), optimizers[0].component().file.string());
  for (const std::size_t i : on_device)
    if (!optimizers.on_device(i))
      return fmt::format("optimizer '{}' does not have the extension \"zr.optimizer.device/1\"", optimizers.id(i));
  return "";
}

StateTiers state_tiers_of(const plan::MemoryPlan& plan) {
  if (!plan.has_offloaded_states())
    return {std::ranges::any_of(plan.rank_plan.reduced_gradients, [](const plan::Piece& p) { return p.count > 0; }),
            false};
  return {std::ranges::any_of(plan.placement.states,
                              [](const plan::StateRange& range) { return range.tier == 0 && range.count > 0; }),
          true};
}

std::string state_location_text(const config::JobConfig& config, const Optimizers& optimizers,
                                const std::string& obstacle, const StateTiers& tiers) {
  const std::string subject = fmt::format("job.device = \"{}\": weights", printable(config.job().device.value));
  if (!obstacle.empty())
    return fmt::format("{}, gradients and optimizer states are in host memory, and the CPU updates them, because {}",
                       subject, obstacle);
  const std::string there =
      fmt::format("memory of the device, and {} updates", optimizers.main().component().file.string());
  if (!tiers.on_tiers) return fmt::format("{}, gradients and optimizer states are in {} them there", subject, there);
  if (!tiers.on_device)
    return subject + " and gradients are in memory of the device, and the CPU updates the optimizer states on tiers";
  return fmt::format("{} and gradients are in {} a part of the optimizer states there, the CPU those on tiers", subject,
                     there);
}

void locate_state(plan::MemoryPlan& plan, const config::JobConfig& config, const plugin::Instance& strategy,
                  const Optimizers& optimizers, const plugin::Instance* communicator, bool has_device) {
  const std::string& device = config.job().device.value;
  if (device == config::kCpuDevice) return;
  const int32_t type = device_type_of(device);
  const bool open = !has_device && communicator && is_for_device(communicator->component(), device) &&
                    !(comm::stream_types_of(*communicator) >> type & 1);  // the job decides
  const std::string obstacle =
      device_obstacle(plan, stream_types_of(strategy), optimizers, open ? nullptr : communicator, type);
  StateTiers tiers = state_tiers_of(plan);
  if (const config::OffloadConfig& offload = config.offload();  // other ranks have the states
      !tiers.on_device && !tiers.on_tiers && offload.optimizer->names_tier())
    tiers = {offload.device_fraction > 0, true};
  plan.state_location = state_location_text(config, optimizers, obstacle, tiers);
  plan.on_device = obstacle.empty();
  plan.device_staging = {};
  if (plan.on_device) plan.device_staging = plan_device_staging(plan, config.offload().overlap);
  if (open && obstacle.empty())
    plan.state_location += fmt::format(", if communicator '{}' ({}) can use the devices: here it reports none",
                                       communicator->component().table->id, communicator->component().file.string());
  const bool saves = !config.checkpoint().dir->empty();  // with checkpoint.async, the last save is synchronous
  plan.save_staging = saves && obstacle.empty() ? checkpoint::SaveOptions().chunk_bytes : 0;
}

plan::MemoryPlan located_plan(plan::PlanInput input,
                              const std::function<plan::MemoryPlan(const plan::PlanInput&)>& make,
                              const std::function<void(plan::MemoryPlan&)>& locate) {
  const auto located = [&] {
    plan::MemoryPlan made = make(input);
    locate(made);
    return made;
  };
  plan::MemoryPlan plan = located();
  if (!plan.in_host_memory() || input.tier_request.device_capacity == 0) return plan;
  input.tier_request.state_in_host_memory = true;
  plan::MemoryPlan in_host_memory = located();
  // Otherwise the state is in host memory only because `auto` chose a tier for a part that does not fit on the device.
  return in_host_memory.on_device ? plan : in_host_memory;
}

}  // namespace zr::host::job
