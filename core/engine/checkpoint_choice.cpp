#include "engine/checkpoint_choice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/manifest.hpp"
#include "zr/error.hpp"

namespace zr::host::engine {

namespace {
// True if training should resume from `folder`: its last step was applied, or was skipped under fp16's dynamic loss
// scale, which is routine. Also true for a checkpoint that cannot be read, so that opening it reports why.
bool is_resumable(const std::string& folder) try {
  const std::string path = fmt::format("{}/{}", folder, checkpoint::kManifest);
  const checkpoint::CheckpointMetadata metadata =
      checkpoint::parse_manifest(path, checkpoint::read_json(path)).metadata;
  return metadata.last_step_applied || metadata.loss_scale.dynamic;
} catch (const Error&) {
  return true;
}

// Removes the newest `folders` up to the first resumable one; removes none if none is resumable.
void pass_over_skipped(std::vector<std::string>& folders) {
  const auto good = std::find_if(folders.begin(), folders.end(), is_resumable);
  if (good == folders.begin() || good == folders.end()) return;
  log(ZR_LOG_WARN,
      fmt::format(
          "{}: its last step was skipped because gradients were not finite; resuming from {}, the newest checkpoint "
          "whose last step was applied (to load the skipped step, pass the path of its checkpoint to engine.load())",
          folders.front(), *good));
  folders.erase(folders.begin(), good);
}
}  // namespace

std::vector<std::string> checkpoints_to_try(const std::string& path, bool fallback,
                                            const checkpoint::CheckpointComm& comm) {
  std::string text;
  run_on_all_ranks(comm, [&] {
    if (comm.rank != 0) return;
    if (checkpoint::is_from_other_program(path)) {
      text = path + "\n";
      return;
    }
    const std::string newest = checkpoint::find_checkpoint(path);
    std::vector<std::string> folders{newest};
    if (newest != path) {
      const std::vector<std::string> names = checkpoint::checkpoints_in(path);
      for (auto name = names.rbegin(); name != names.rend(); ++name)
        if (path + "/" + *name != newest) folders.push_back(path + "/" + *name);
      pass_over_skipped(folders);
    }
    if (!fallback) folders.resize(1);
    for (const std::string& folder : folders) text += folder + "\n";
  });
  std::istringstream lines(comm.broadcast(text));
  std::vector<std::string> folders;
  for (std::string line; std::getline(lines, line);) folders.push_back(line);
  return folders;
}

// Not an error: a job that restarts automatically also starts with checkpoint.resume the first time. A folder that
// contains other files is probably the wrong one.
void report_no_checkpoint(const std::string& dir) {
  std::string where = dir;
  int level = ZR_LOG_INFO;
  if (!path_exists(dir)) {
    where += " (the folder does not exist yet)";
  } else if (const auto names = list_folder(dir); std::any_of(names.begin(), names.end(), [](const std::string& name) {
               return name != checkpoint::kLockName && !name.starts_with("step-");
             })) {
    where += " (the folder contains other files; check that checkpoint.dir is correct)";
    level = ZR_LOG_WARN;
  }
  log(level, "no checkpoint in " + where + "; training starts at step 1");
}

}  // namespace zr::host::engine
