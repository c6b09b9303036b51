// The folder of a job's checkpoints: which are whole, who may write, what is left of a save that did not end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/directory.hpp"

namespace zr::host {

/// The file of FolderLock.
inline constexpr const char* kLockName = "lock";

/// "step-00000012": a checkpoint that was committed. Others in the folder are not.
std::string checkpoint_name(int64_t step);
/// It has that form, though its number may be too large for a step.
bool is_checkpoint_name(const std::string& name);
/// The step that such a name gives; nothing: it is another name, or gives none.
std::optional<int64_t> step_of_name(const std::string& name);
/// Names of the committed checkpoints in `root`, by step.
std::vector<std::string> checkpoints_in(const std::string& root);
/// `path` itself if it is a checkpoint, else the newest committed one in it. Throws Failure(user) if there is none.
std::string find_checkpoint(const std::string& path);

/// Holds a folder for one job's saves until it is destroyed, or the process ends, however. Throws Failure(user) naming
/// the owner's host and process where another has it.
class FolderLock {
 public:
  explicit FolderLock(const std::string& root);
  FolderLock(const FolderLock&) = delete;

 private:
  FileLock lock_;
};

/// A name for a checkpoint's folder until it is committed: "step-00000012.9f3a5c0e.partial", another at each call, so
/// that no rank takes the folder of an earlier save for it.
std::string new_partial_name(int64_t step);

// By the owner of the lock alone. They use the directory's descriptor: its path is not resolved again.

/// Removes what earlier saves left that were not committed.
void remove_uncommitted(const Directory& root);
/// The folder `name`, which `partial` is, becomes checkpoint_name(step); one of that step that was there before changes
/// places with it.
void commit_checkpoint(const Directory& root, const std::string& name, const Directory& partial, int64_t step);
/// What follows a commit: the disk has it, the one it replaced, which is `name` now, goes, and those of later steps,
/// which an earlier run left, are set aside as NAME.superseded, so that the newest is the one just saved. Returns their
/// new names.
std::vector<std::string> finish_commit(const Directory& root, const std::string& name, int64_t step);
/// Removes all but the newest `keep` (0: none) and the newest whose last step was applied, so that a run whose steps
/// are skipped never loses its last good checkpoint. `newest_applied`: the newest is known to be one.
void remove_old_checkpoints(const Directory& root, int64_t keep, bool newest_applied);
/// The last step of a checkpoint was applied; false: it was skipped, or the manifest cannot be read.
bool last_step_applied(const std::string& folder);

}  // namespace zr::host
