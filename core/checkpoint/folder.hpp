// The folder of a job's checkpoints: finding committed checkpoints, locking, commit, retention, and removal of
// interrupted saves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/directory.hpp"

namespace zr::host::checkpoint {

/// The file that FolderLock locks.
inline constexpr const char* kLockName = "lock";

/// "step-00000012": the folder name of a committed checkpoint. Folders with other names are not committed.
std::string checkpoint_name(int64_t step);
/// Whether `name` has that form; its number may be too large for a step.
bool is_checkpoint_name(const std::string& name);
/// The step in such a name; nothing if the name has another form or its number is too large.
std::optional<int64_t> step_of_name(const std::string& name);
/// Names of the committed checkpoints in `root`, in order of their steps.
std::vector<std::string> checkpoints_in(const std::string& root);
/// `path` itself if it is a checkpoint, else the newest committed one in it. Throws UserError if `path` does not exist,
/// is not a folder, or contains no checkpoint.
std::string find_checkpoint(const std::string& path);

/// Locks a folder for the saves of one job until this object is destroyed or the process ends in any way. Throws
/// UserError naming the owner's host name and process id if another process holds the lock.
class FolderLock {
 public:
  explicit FolderLock(const std::string& root);
  FolderLock(const FolderLock&) = delete;

 private:
  FileLock lock_;
};

/// A name for a checkpoint's folder until it is committed: "step-00000012.9f3a5c0e.partial". The name differs at each
/// call, so that no rank confuses the folder with that of an earlier save.
std::string new_partial_name(int64_t step);

// Only the owner of the lock may call these functions. They use the directory's descriptor and do not resolve its path
// again.

/// Removes the folders that interrupted saves left uncommitted.
void remove_uncommitted(const Directory& root);
/// Renames the folder `name`, open as `partial`, to checkpoint_name(step). If a checkpoint of that step exists, the two
/// folders are exchanged atomically.
void commit_checkpoint(const Directory& root, const std::string& name, const Directory& partial, int64_t step);
/// Completes a commit: syncs the folder to disk, removes the replaced checkpoint, which is now called `name`, and
/// renames checkpoints of later steps, which an earlier run left, to NAME.superseded, so that the newest checkpoint is
/// the one just saved. Returns the new names.
std::vector<std::string> finish_commit(const Directory& root, const std::string& name, int64_t step);
/// Removes all checkpoints except the newest `keep` (0: removes none) and the newest whose last step was applied, so
/// that a run whose steps are skipped never loses its last good checkpoint. `newest_applied`: the last step of the
/// newest checkpoint is known to be applied. Superseded checkpoints count as the oldest; of them, those saved first are
/// removed first, but none of `just_superseded`, as finish_commit() returned them. Entries without a manifest stay.
void remove_old_checkpoints(const Directory& root, int64_t keep, bool newest_applied,
                            const std::vector<std::string>& just_superseded = {});
/// Whether the last step of a checkpoint was applied; false if it was skipped, or the manifest cannot be read.
bool last_step_applied(const std::string& folder);

}  // namespace zr::host::checkpoint
