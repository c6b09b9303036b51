#include "cli/checkpoint_commands.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>

#include "base/failure.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "cli/progress.hpp"

namespace zr::host {

namespace fs = std::filesystem;

namespace {
Checkpoint opened(const std::string& folder) {
  Progress progress("opening " + printable(folder));
  return Checkpoint(folder, [&](int64_t done, int64_t all) { progress.at(done, all); });
}

// A folder at one moment: its inode, or nothing where it is missing.
std::optional<std::pair<dev_t, ino_t>> identity_of(const std::string& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) return {};
  return std::pair(about.st_dev, about.st_ino);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t n : shape) text += (text.empty() ? "" : " x ") + std::to_string(n);
  return text.empty() ? "1" : text;
}
void verify_one(const std::string& folder, const std::function<void(const std::string&)>& begins) {
  if (begins) begins(folder);
  const Checkpoint checkpoint = opened(folder);
  {
    Progress progress(printable(folder), checkpoint.bytes());
    checkpoint.verify([&](int64_t done) { progress.at(done); });
  }
  std::cout << printable(folder) << ": whole, step " << checkpoint.manifest().step << ", "
            << checkpoint.manifest().tensors.size() << " tensors, " << bytes_text(checkpoint.bytes()) << "\n";
}
}  // namespace

int verify_checkpoints(const std::string& folder, const std::function<void(const std::string&)>& begins) {
  int code = 0;
  // False: it was removed or replaced meanwhile, and nothing is known of it.
  const auto verify = [&](const std::string& one) {
    const auto before = identity_of(one);
    try {
      verify_one(one, begins);
      return true;
    } catch (const Failure& failure) {
      if (identity_of(one) != before) return false;
      std::cout << printable(failure.what()) << "\n";
      code = failure.code();
      return true;
    }
  };
  if (path_exists((fs::path(folder) / kManifest).string())) {
    // It may be removed (checkpoint.keep) or replaced meanwhile: neither is a loss. What took its place is verified.
    while (!verify(folder))
      if (!path_exists(folder))
        fail_user(printable(folder) +
                  ": was removed by another process while it was verified; its contents are not known to be damaged");
    return code;
  }
  std::set<std::string> done, removed;
  // A job that saves there meanwhile removes checkpoints (checkpoint.keep) and replaces them: what was removed is no
  // loss, and what took its place is verified too.
  for (bool again = true; again;) {
    again = false;
    const std::vector<std::string> names = checkpoints_in(folder);
    if (names.empty() && done.empty() && removed.empty()) find_checkpoint(folder);  // throws
    for (const std::string& name : names) {
      if (done.count(name)) continue;
      if (verify((fs::path(folder) / name).string())) {
        done.insert(name);
        removed.erase(name);
      } else {
        removed.insert(name);
        again = true;
      }
    }
  }
  if (done.empty())
    fail_user(printable(folder) + ": its checkpoints were removed by another process before one was verified");
  for (const std::string& name : removed)
    std::cout << printable((fs::path(folder) / name).string())
              << ": was removed by another process while it was verified; not counted\n";
  return code;
}

// The checkpoint that `path` is, or the newest in it. A job that saves there may remove it (checkpoint.keep) before all
// its files are open; then the newest of that moment is opened. Later removals do not matter: open files stay readable.
Checkpoint open_newest(const std::string& path) {
  constexpr int kTries = 10;
  for (int i = 0;; ++i) {
    const std::string folder = find_checkpoint(path);
    const auto before = identity_of(folder);
    try {
      return opened(folder);
    } catch (const Failure&) {
      if (i + 1 == kTries || folder == path || identity_of(folder) == before) throw;
    }
  }
}

void show_checkpoint(const std::string& folder) {
  const Checkpoint checkpoint = open_newest(folder);
  const Manifest& manifest = checkpoint.manifest();
  std::cout << printable(checkpoint.folder()) << ": step " << manifest.step << " of run " << printable(manifest.run)
            << ", " << bytes_text(checkpoint.bytes()) << "\n";
  const CheckpointMetadata& facts = manifest.metadata;
  if (!checkpoint.foreign()) {
    std::cout << "written by " << facts.world << " ranks under " << printable(facts.strategy) << " with "
              << printable(facts.optimizer) << "\n";
    if (!facts.last_step_applied) std::cout << "its last step was skipped because gradients were not finite\n";
    std::istringstream lines(facts.config);  // indented, so that none can pass for a line of ours
    std::cout << "\n";
    for (std::string line; std::getline(lines, line);)
      std::cout << (line.empty() ? "" : "  ") << printable(line) << "\n";
    std::cout << "\n";
  }
  std::size_t name = 0, shape = 0, role = 0;
  for (const SavedTensor& tensor : manifest.tensors) {
    name = std::max(name, printable(tensor.name).size());
    role = std::max(role, printable(tensor.role).size());
    shape = std::max(shape, shape_text(tensor.shape).size());
  }
  for (const SavedTensor& tensor : manifest.tensors)
    std::cout << std::left << std::setw(static_cast<int>(role)) << printable(tensor.role) << "  "
              << std::setw(static_cast<int>(name)) << printable(tensor.name) << "  " << std::setw(5) << tensor.dtype
              << " " << std::right << std::setw(static_cast<int>(shape)) << shape_text(tensor.shape) << "  "
              << std::setw(10) << bytes_text(tensor.bytes()) << "\n";
}

}  // namespace zr::host
