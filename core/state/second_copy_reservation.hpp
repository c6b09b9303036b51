// The disk space for the second copy of optimizer states, to which an update that may be undone writes.
#pragma once

#include "job/step_context.hpp"
#include "offload/optimizer_states.hpp"

namespace zr::host::state {

/// Reserves the second copies of the states on disk, once all ranks, which may share a disk, have reserved the first
/// ones. Returns whether this rank can undo an update. If the space is missing on one rank, then with offload.speculate
/// = "auto" no rank can, and one logs a warning; with "always" it throws EnvironmentError there, and PeerFailedError on
/// the other ranks. Collective.
bool reserve_second_copy(const job::StepContext& context, offload::OptimizerStates& states);

}  // namespace zr::host::state
