// For file systems that have no unnamed files: a folder zeroth-swap-<job id> with one file a rank, and a lock that is
// held as long as a rank lives.
#pragma once

#include <functional>
#include <string>

namespace nvme {

class SwapFolder {
 public:
  /// Makes the folder, or joins it. Throws zr::Error.
  SwapFolder(const std::string& path, const std::string& job);
  ~SwapFolder();  // the last of the job's ranks removes it
  SwapFolder(const SwapFolder&) = delete;
  /// A file of this rank's own; its name and descriptor.
  int create(int rank, std::string& name);
  void remove(const std::string& name) const;

 private:
  std::string folder_;
  int lock_ = -1;
};

/// Removes the folders in `path` that jobs left behind: those of this user whose lock nobody holds.
void remove_abandoned(const std::string& path, const std::function<void(const std::string& folder)>& removed);

}  // namespace nvme
