// Chooses which checkpoints of a folder to try, and in which order.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/load.hpp"
#include "checkpoint/save.hpp"

namespace zr::host::engine {

/// Paths to try, newest first: `path` itself if it is a checkpoint or has weights of another program, else the
/// checkpoints in it. Without `fallback`, only the first of them. Collective.
std::vector<std::string> checkpoints_to_try(const std::string& path, bool fallback,
                                            const checkpoint::CheckpointComm& comm);

/// Logs that the folder to resume from has no checkpoint; as a warning if it contains other files.
void report_no_checkpoint(const std::string& dir);

}  // namespace zr::host::engine
