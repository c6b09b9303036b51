#include "state/second_copy_reservation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "job/all_gather.hpp"

namespace zr::host::state {

namespace {
// The same on all ranks: whether the plan of any rank may have a second copy.
bool may_have_copies(const plan::PlanInput& input) {
  const plan::TierRequest& request = input.tier_request;
  if (input.tiers.size() == 1 || request.speculation == plan::Speculation::none) return false;
  return request.speculation == plan::Speculation::always || request.host_capacity > 0;
}

// Why the copies cannot be reserved; empty: they are, or the plan has none.
std::string try_to_reserve(const plan::MemoryPlan& plan, offload::OptimizerStates& states) {
  if (plan.placement.speculates) try {
      states.reserve_copies();
    } catch (const EnvironmentError& failure) {
      return failure.what();
    }
  return "";
}
}  // namespace

bool reserve_second_copy(const job::StepContext& context, offload::OptimizerStates& states) {
  const plan::MemoryPlan& plan = context.plan;
  if (context.device || !may_have_copies(plan.input)) return false;  // on a device, no update is speculative
  context.comm.barrier("first copy of states");
  const std::string problem = try_to_reserve(plan, states);
  const std::vector<char> failed =
      job::all_gather(context.comm, static_cast<char>(problem.empty() ? 0 : 1), "second copy of states");
  const auto first = std::find(failed.begin(), failed.end(), 1) - failed.begin();
  if (first == std::ssize(failed)) return plan.placement.speculates;
  states.release_copies();
  const bool is_required = plan.input.tier_request.speculation == plan::Speculation::always;
  if (is_required && problem.empty())
    throw PeerFailedError(
        fmt::format("rank {} has no disk space for the second copy of its optimizer states (offload.speculate = "
                    "\"always\"); see that rank's error",
                    first));
  if (is_required)
    fail_environment(
        fmt::format("{}; offload.speculate = \"always\" ({}) needs this space for a second copy of the "
                    "optimizer states: set it to \"auto\" or \"never\" to train without the copy",
                    problem, context.config().offload().speculate.origin.text()));
  if (first == context.rank())
    log(ZR_LOG_WARN,
        fmt::format(
            "offload.speculate = \"auto\" has no effect, because the disk has no space for a second copy of the "
            "optimizer states, so their update begins after backward: {}",
            problem));
  return false;
}

}  // namespace zr::host::state
