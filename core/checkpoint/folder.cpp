#include "checkpoint/folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/state_dict_pickle.hpp"

namespace zr::host::checkpoint {

namespace fs = std::filesystem;

namespace {
const std::string kPrefix = "step-", kPartial = ".partial", kRemoved = ".removed", kSuperseded = ".superseded";

std::string join_path(const std::string& root, const std::string& name) { return (fs::path(root) / name).string(); }

// Renames the folder, which removes the checkpoint atomically, then deletes its files.
void discard(const Directory& root, const std::string& name) {
  const std::string removed = name + kRemoved;
  root.rename(name, removed);
  failpoint("retain.renamed");
  root.remove_all(removed);
}

// The names of checkpoints in `names`, in order of their steps.
std::vector<std::string> by_step(const std::vector<std::string>& names) {
  std::vector<std::string> checkpoints;
  for (const std::string& name : names)
    if (is_checkpoint_name(name)) checkpoints.push_back(name);
  std::sort(checkpoints.begin(), checkpoints.end(),
            [](const std::string& a, const std::string& b) { return std::pair(a.size(), a) < std::pair(b.size(), b); });
  return checkpoints;
}
}  // namespace

bool is_checkpoint_name(const std::string& name) {
  return name.size() >= kPrefix.size() + 8 && name.starts_with(kPrefix) &&
         name.find_first_not_of("0123456789", kPrefix.size()) == std::string::npos;
}

std::string checkpoint_name(int64_t step) { return fmt::format("{}{:08}", kPrefix, step); }

std::optional<int64_t> step_of_name(const std::string& name) {
  int64_t step = 0;
  if (!is_checkpoint_name(name) ||
      std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step).ec != std::errc())
    return {};
  return step;
}

std::vector<std::string> checkpoints_in(const std::string& root) { return by_step(list_folder(root)); }

namespace {
[[noreturn]] void fail_no_checkpoint(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  const bool exists = fs::exists(status);
  if (exists && is_state_dict_file(path))
    fail_user(fmt::format(
        "{}: is a file of PyTorch's torch.save(), which only engine.load() and zr::load_weights() read; load it in the "
        "program, or convert it to safetensors",
        printable(path)));
  const std::string problem = status.type() == fs::file_type::not_found ? "does not exist"
                              : !exists                                 ? "cannot be read: " + error.message()
                              : fs::is_directory(status)                ? "contains no committed checkpoint"
                                                                        : "is not a folder";
  if (!fs::is_directory(status) && has_state_dict_extension(path))
    fail_user(fmt::format(
        "{}: {}; correct the path of this file of torch.save(), which only engine.load() and zr::load_weights() read",
        printable(path), exists ? "is not a regular file" : problem));
  const bool is_file = fs::is_regular_file(status);
  fail_user(fmt::format("{}: {}; name the folder that was given to engine.save() or checkpoint.dir{}", printable(path),
                        problem, is_file ? ", or a file of weights, which ends in .safetensors" : ""));
}
}  // namespace

std::string find_checkpoint(const std::string& path) {
  if (path_exists(join_path(path, kManifest))) return path;
  const std::vector<std::string> names = checkpoints_in(path);
  if (names.empty()) fail_no_checkpoint(path);
  return join_path(path, names.back());
}

namespace {
FileLock take_lock(const std::string& root) {
  std::string holder;
  auto lock = FileLock::try_take(Directory::open(root, true), kLockName, holder);
  if (!lock && holder.starts_with(fmt::format("process {} on ", ::getpid())))
    fail_user(root +
              ": this job has already locked the folder, as its run folder or for the checkpoints of another engine; "
              "save to a separate folder, for example inside this one");
  if (!lock)
    fail_user(fmt::format(
        "{}: another job is saving to this folder ({}); give each job its own folder (checkpoint.dir)", root, holder));
  return std::move(*lock);
}
}  // namespace

FolderLock::FolderLock(const std::string& root) : lock_(take_lock(root)) {}

std::string new_partial_name(int64_t step) {
  return fmt::format("{}.{:08x}{}", checkpoint_name(step), std::random_device()(), kPartial);
}

void remove_uncommitted(const Directory& root) {
  for (const std::string& name : root.list())
    if (name.starts_with(kPrefix) && (name.ends_with(kPartial) || name.ends_with(kRemoved))) root.remove_all(name);
}

void commit_checkpoint(const Directory& root, const std::string& name, const Directory& partial, int64_t step) {
  const std::string final_name = checkpoint_name(step);
  partial.sync();
  failpoint("save.before_commit");
  if (!root.has(final_name)) {
    root.rename(name, final_name);
  } else if (!root.exchange(name, final_name)) {  // atomic: a checkpoint of that step exists at every moment
    fail_environment(
        fmt::format("{}: already exists and cannot be replaced atomically on this file system: {}; remove it, or save "
                    "to another folder",
                    join_path(root.path(), final_name), std::strerror(errno)));
  }
  failpoint("save.committed");
}

std::vector<std::string> finish_commit(const Directory& root, const std::string& name, int64_t step) {
  std::vector<std::string> superseded;
  for (const std::string& checkpoint : by_step(root.list())) {
    if (std::pair(checkpoint.size(), checkpoint) <= std::pair(checkpoint_name(step).size(), checkpoint_name(step)))
      continue;
    std::string new_name = checkpoint + kSuperseded;
    for (int n = 2; root.has(new_name); ++n) new_name = fmt::format("{}{}-{}", checkpoint, kSuperseded, n);
    root.rename(checkpoint, new_name);
    superseded.push_back(new_name);
  }
  root.sync();
  failpoint("save.root_synced");
  root.remove_all(name);
  return superseded;
}

bool last_step_applied(const std::string& folder) try {
  const std::string path = join_path(folder, kManifest);
  return parse_manifest(path, read_json(path)).metadata.last_step_applied;
} catch (const Error&) {
  return false;
}

namespace {
// "step-00000012.superseded" or "step-00000012.superseded-2".
bool is_superseded_name(const std::string& name) {
  const auto end = name.find(kSuperseded);
  if (end == name.npos || !is_checkpoint_name(name.substr(0, end))) return false;
  const std::string number = name.substr(end + kSuperseded.size());
  return number.empty() ||
         (number.size() > 1 && number[0] == '-' && number.find_first_not_of("0123456789", 1) == number.npos);
}

// The names of superseded checkpoints, in the order in which they were saved.
std::vector<std::string> superseded_in(const Directory& root) {
  std::vector<std::pair<fs::file_time_type, std::string>> saved;
  for (const std::string& name : root.list()) {
    std::error_code error;
    if (is_superseded_name(name)) saved.emplace_back(fs::last_write_time(join_path(root.path(), name), error), name);
  }
  std::sort(saved.begin(), saved.end());
  std::vector<std::string> names;
  for (auto& [time, name] : saved) names.push_back(std::move(name));
  return names;
}
}  // namespace

void remove_old_checkpoints(const Directory& root, int64_t keep, bool newest_applied,
                            const std::vector<std::string>& just_superseded) {
  if (keep <= 0) return;
  std::vector<std::string> names = by_step(root.list()), superseded = superseded_in(root);
  for (auto* list : {&names, &superseded})  // without a manifest, an entry is not a checkpoint, but may be the user's
    std::erase_if(*list, [&](const std::string& name) { return !root.has_file(join_path(name, kManifest)); });
  int64_t over = std::ssize(names) + std::ssize(superseded) - keep;
  for (std::size_t i = 0; i < superseded.size() && over > 0; ++i, --over)
    if (std::ranges::find(just_superseded, superseded[i]) == just_superseded.end()) discard(root, superseded[i]);
  if (std::ssize(names) <= keep) return;
  std::size_t applied = names.size();
  if (newest_applied) {
    --applied;
  } else {
    while (applied > 0 && !last_step_applied(join_path(root.path(), names[applied - 1]))) --applied;
    applied = applied > 0 ? applied - 1 : names.size();
  }
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < names.size(); ++i)
    if (i != applied) discard(root, names[i]);
}

}  // namespace zr::host::checkpoint
