// The paths in [checkpoint], checked before ranks start and again by rank 0.
#pragma once

#include <string>

#include "config/config.hpp"

namespace zr::host::job {

/// Checks checkpoint.dir and checkpoint.init of a job, of which one may be "". Reads folders, so call it on one rank.
/// Throws UserError if
/// - checkpoint.dir is a relative path in the file, the folder that it names has no checkpoints, and the folder of the
///   same name in the working directory has some: training would start again;
/// - checkpoint.init names neither a checkpoint, a folder of checkpoints, nor safetensors files. Not checked if the job
///   resumes from a checkpoint.
void check_checkpoint_paths(const config::CheckpointConfig& checkpoint);

}  // namespace zr::host::job
