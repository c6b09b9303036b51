#include "checkpoint/folder.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/failure.hpp"
#include "base/file.hpp"
#include "checkpoint/manifest.hpp"

namespace zr::host {

namespace fs = std::filesystem;

namespace {
const std::string kPrefix = "step-", kAside = ".partial", kRemoved = ".removed", kSuperseded = ".superseded";

bool is_checkpoint_name(const std::string& name) {
  return name.size() >= kPrefix.size() + 8 && name.starts_with(kPrefix) &&
         name.find_first_not_of("0123456789", kPrefix.size()) == std::string::npos;
}

std::string place(const std::string& root, const std::string& name) { return (fs::path(root) / name).string(); }

// Out of sight at once, then bit by bit.
void discard(const std::string& root, const std::string& name) {
  const std::string removed = place(root, name + kRemoved);
  rename_path(place(root, name), removed);
  failpoint("retain.renamed");
  remove_path(removed);
}
}  // namespace

std::string checkpoint_name(int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "%s%08lld", kPrefix.c_str(), static_cast<long long>(step));
  return name;
}

std::optional<int64_t> step_of_name(const std::string& name) {
  int64_t step = 0;
  if (!is_checkpoint_name(name) ||
      std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step).ec != std::errc())
    return {};
  return step;
}

std::vector<std::string> checkpoints_in(const std::string& root) {
  std::vector<std::string> names;
  for (const std::string& name : list_folder(root))
    if (is_checkpoint_name(name)) names.push_back(name);
  std::sort(names.begin(), names.end(),
            [](const std::string& a, const std::string& b) { return std::pair(a.size(), a) < std::pair(b.size(), b); });
  return names;
}

std::string find_checkpoint(const std::string& path) {
  if (is_there(place(path, kManifest))) return path;
  const std::vector<std::string> names = checkpoints_in(path);
  if (names.empty())
    fail_user(
        path +
        ": holds no checkpoint that was committed; name a folder that engine.save() or [checkpoint] dir wrote to");
  return place(path, names.back());
}

namespace {
FileLock take_lock(const std::string& root) {
  std::string holder;
  auto lock = FileLock::try_take(Directory::open(root, true), kLockName, holder);
  if (!lock)
    fail_user(root + ": another job saves there (" + holder + "); give each job a folder of its own (checkpoint.dir)");
  return std::move(*lock);
}
}  // namespace

FolderLock::FolderLock(const std::string& root) : lock_(take_lock(root)) {}

std::string aside_of(const std::string& root, int64_t step) { return place(root, checkpoint_name(step) + kAside); }

void remove_debris(const std::string& root) {
  for (const std::string& name : list_folder(root))
    if (name.starts_with(kPrefix) && (name.ends_with(kAside) || name.ends_with(kRemoved)))
      remove_path(place(root, name));
}

void commit(const std::string& root, int64_t step) {
  const std::string aside = aside_of(root, step), name = checkpoint_name(step), whole = place(root, name);
  sync_folder(aside);
  failpoint("save.before_commit");
  if (is_there(whole)) {  // the two change places at once: at no instant is there none of that step
    if (::renameat2(AT_FDCWD, aside.c_str(), AT_FDCWD, whole.c_str(), RENAME_EXCHANGE) != 0)
      fail_environment(whole + ": is there already and cannot be replaced in one step on this file system: " +
                       std::strerror(errno) + "; remove it, or save in another folder");
  } else {
    rename_path(aside, whole);
  }
  failpoint("save.committed");
}

std::vector<std::string> settle(const std::string& root, int64_t step) {
  std::vector<std::string> superseded;
  for (const std::string& name : checkpoints_in(root)) {
    if (std::pair(name.size(), name) <= std::pair(checkpoint_name(step).size(), checkpoint_name(step))) continue;
    std::string as = name + kSuperseded;
    for (int n = 2; is_there(place(root, as)); ++n) as = name + kSuperseded + "-" + std::to_string(n);
    rename_path(place(root, name), place(root, as));
    superseded.push_back(as);
  }
  sync_folder(root);
  failpoint("save.root_synced");
  remove_path(aside_of(root, step));
  return superseded;
}

bool last_step_applied(const std::string& folder) try {
  const std::string path = place(folder, kManifest);
  return parse_manifest(path, read_json(path)).training.last_step_applied;
} catch (const Failure&) {
  return false;
}

void retain(const std::string& root, int64_t keep, bool newest_applied) {
  const std::vector<std::string> names = checkpoints_in(root);
  if (keep <= 0 || std::ssize(names) <= keep) return;
  std::size_t applied = names.size();
  if (newest_applied) {
    --applied;
  } else {
    while (applied > 0 && !last_step_applied(place(root, names[applied - 1]))) --applied;
    applied = applied > 0 ? applied - 1 : names.size();
  }
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < names.size(); ++i)
    if (i != applied) discard(root, names[i]);
}

}  // namespace zr::host
