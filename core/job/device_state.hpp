// Training state in memory of the device that the model is on: whether it is there, and its gradient norm.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "job/step_context.hpp"

namespace zr::host::job {

/// Why weights, gradients and states of a job whose model is on a device of this type are in host memory, where the CPU
/// updates them; "": they are on the device. stream_types: the device types that the strategy accepts, with streams.
/// `communicator`: null for one rank.
std::string device_obstacle(const plan::MemoryPlan& plan, uint64_t stream_types, const Optimizers& optimizers,
                            const plugin::Instance* communicator, int32_t device_type);
/// Where ranks have optimizer states; neither: they have none.
struct StateTiers {
  bool on_device = false, on_tiers = false;
};
/// Where the rank of the plan has optimizer states.
StateTiers state_tiers_of(const plan::MemoryPlan& plan);
/// The sentence that says where the training state is, and why; `obstacle`: a result of device_obstacle(); `tiers`: of
/// all ranks.
std::string state_location_text(const config::JobConfig& config, const Optimizers& optimizers,
                                const std::string& obstacle, const StateTiers& tiers);
/// Sets where the training state is in a plan of this job: MemoryPlan::state_location to save_staging. has_device: the
/// process has opened the device; otherwise the communicator may report that it cannot use it although the job can.
void locate_state(plan::MemoryPlan& plan, const config::JobConfig& config, const plugin::Instance& strategy,
                  const Optimizers& optimizers, const plugin::Instance* communicator, bool has_device);
/// The plan that `make` makes, with its state located by `locate` (locate_state()). If all state is in host memory, the
/// device's capacity limits only copies of weights, and activations.
plan::MemoryPlan located_plan(plan::PlanInput input,
                              const std::function<plan::MemoryPlan(const plan::PlanInput& input)>& make,
                              const std::function<void(plan::MemoryPlan& plan)>& locate);

}  // namespace zr::host::job
