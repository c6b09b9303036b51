#include "cli/checkpoint_commands.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "checkpoint/folder.hpp"
#include "cli/progress.hpp"

namespace zr::host::cli {

namespace fs = std::filesystem;

namespace {
checkpoint::Checkpoint opened(const std::string& folder) {
  Progress progress("opening " + printable(folder));
  return checkpoint::Checkpoint(folder, [&](int64_t done, int64_t total) { progress.show(done, total); });
}

// Device and inode of a folder, or nothing if it does not exist. They change when the folder is replaced.
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
void verify_checkpoint(const std::string& folder, const std::function<void(const std::string&)>& begins) {
  if (begins) begins(folder);
  const checkpoint::Checkpoint checkpoint = opened(folder);
  {
    Progress progress(printable(folder), checkpoint.bytes());
    checkpoint.verify([&](int64_t done) { progress.show(done); });
  }
  std::cout << printable(folder) << ": intact, step " << checkpoint.manifest().step << ", "
            << checkpoint.manifest().tensors.size() << " tensors, " << bytes_text(checkpoint.bytes()) << "\n";
}

// Verifies checkpoints that another process may remove or replace meanwhile, and prints the results.
class Verifier {
 public:
  explicit Verifier(const std::function<void(const std::string&)>& begins) : begins_(begins) {}

  /// Returns false if another process removed or replaced the checkpoint meanwhile, so that its state is unknown.
  bool verify(const std::string& path) {
    const auto before = identity_of(path);
    try {
      verify_checkpoint(path, begins_);
      return true;
    } catch (const Error& failure) {
      if (identity_of(path) != before) return false;
      std::cout << printable(failure.what()) << "\n";
      exit_code_ = failure.exit_code();
      return true;
    }
  }
  int exit_code() const { return exit_code_; }  // 0 if no checkpoint is damaged

 private:
  const std::function<void(const std::string&)>& begins_;
  int exit_code_ = 0;
};

// A job may remove (checkpoint.keep) or replace the checkpoint meanwhile: verifies the replacement.
void verify_one(const std::string& path, Verifier& verifier) {
  while (!verifier.verify(path))
    if (!path_exists(path))
      fail_user(printable(path) +
                ": another process removed this checkpoint during the verification, so its state is unknown; verify "
                "another checkpoint");
}

// A job that saves in this folder meanwhile may remove checkpoints (checkpoint.keep) and replace them. A removal is
// not an error; replacements are verified.
void verify_all_in(const std::string& folder, Verifier& verifier) {
  std::set<std::string> done, removed;
  for (bool again = true; again;) {
    again = false;
    const std::vector<std::string> names = checkpoint::checkpoints_in(folder);
    if (names.empty() && done.empty() && removed.empty()) checkpoint::find_checkpoint(folder);  // throws
    for (const std::string& name : names) {
      if (done.count(name)) continue;
      if (verifier.verify((fs::path(folder) / name).string())) {
        done.insert(name);
        removed.erase(name);
      } else {
        removed.insert(name);
        again = true;
      }
    }
  }
  if (done.empty())
    fail_user(printable(folder) +
              ": another process removed all checkpoints before one was verified; run the command again");
  for (const std::string& name : removed)
    std::cout << printable((fs::path(folder) / name).string())
              << ": not verified: another process removed this checkpoint meanwhile\n";
}
}  // namespace

int verify_checkpoints(const std::string& folder, const std::function<void(const std::string&)>& begins) {
  Verifier verifier(begins);
  if (path_exists((fs::path(folder) / checkpoint::kManifest).string()))
    verify_one(folder, verifier);
  else
    verify_all_in(folder, verifier);
  return verifier.exit_code();
}

// A job that saves in the folder may remove the newest checkpoint (checkpoint.keep) before all of its files are open;
// then the search starts again. A later removal does not matter, because open files stay readable.
checkpoint::Checkpoint open_newest(const std::string& path) {
  constexpr int kTries = 10;
  for (int i = 0;; ++i) {
    const std::string folder = checkpoint::find_checkpoint(path);
    const auto before = identity_of(folder);
    try {
      return opened(folder);
    } catch (const Error&) {
      if (i + 1 == kTries || folder == path || identity_of(folder) == before) throw;
    }
  }
}

void show_checkpoint(const std::string& folder) {
  const checkpoint::Checkpoint checkpoint = open_newest(folder);
  const checkpoint::Manifest& manifest = checkpoint.manifest();
  std::cout << printable(checkpoint.folder()) << ": step " << manifest.step << " of run " << printable(manifest.run)
            << ", " << bytes_text(checkpoint.bytes()) << "\n";
  const checkpoint::CheckpointMetadata& metadata = manifest.metadata;
  if (!checkpoint.from_other_program()) {
    std::cout << "written by " << metadata.world << " ranks under " << printable(metadata.strategy) << " with "
              << printable(metadata.optimizer) << "\n";
    if (!metadata.last_step_applied) std::cout << "the last step was skipped because of non-finite gradients\n";
    std::istringstream lines(metadata.config);  // indented, so that no line of it looks like output of this command
    std::cout << "\n";
    for (std::string line; std::getline(lines, line);)
      std::cout << (line.empty() ? "" : "  ") << printable(line) << "\n";
    std::cout << "\n";
  }
  std::size_t name = 0, shape = 0, kind = 0;
  for (const checkpoint::SavedTensor& tensor : manifest.tensors) {
    name = std::max(name, printable(tensor.name).size());
    kind = std::max(kind, printable(tensor.kind).size());
    shape = std::max(shape, shape_text(tensor.shape).size());
  }
  for (const checkpoint::SavedTensor& tensor : manifest.tensors)
    std::cout << std::left << std::setw(static_cast<int>(kind)) << printable(tensor.kind) << "  "
              << std::setw(static_cast<int>(name)) << printable(tensor.name) << "  " << std::setw(5) << tensor.dtype
              << " " << std::right << std::setw(static_cast<int>(shape)) << shape_text(tensor.shape) << "  "
              << std::setw(10) << bytes_text(tensor.bytes()) << "\n";
}

}  // namespace zr::host::cli
