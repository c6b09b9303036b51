// Which checkpoint to load: of a folder of them, and where the newest is damaged.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/load.hpp"
#include "checkpoint/save.hpp"

namespace zr::host {

/// What to try, newest first: the checkpoint that `path` is, those that it holds, or weights of another program.
/// Without `fallback` the first alone. Collective.
std::vector<std::string> checkpoints_to_try(const std::string& path, bool fallback, const CheckpointComm& comm);

/// Logs that a folder to resume from has no checkpoint: as a warning if it holds other files.
void report_no_checkpoint(const std::string& dir);

}  // namespace zr::host
