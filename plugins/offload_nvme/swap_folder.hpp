// For file systems without unnamed files: a folder zeroth-swap-<job id> with one file per rank, and a lock file that
// the ranks hold as long as they live.
#pragma once

#include <functional>
#include <string>

namespace nvme {

class SwapFolder {
 public:
  /// Creates the folder, or joins the one that another rank created. Throws zr::PluginError.
  SwapFolder(const std::string& path, const std::string& job);
  ~SwapFolder();  // the last of the job's ranks removes it
  SwapFolder(const SwapFolder&) = delete;
  /// Creates a file for this rank. Sets its name and returns its descriptor.
  int create(int rank, std::string& name);
  void remove(const std::string& name) const;

 private:
  std::string folder_;
  int lock_ = -1;
};

/// Removes the folders in `path` that ended jobs left behind: folders of this user whose lock no process holds.
void remove_abandoned(const std::string& path, const std::function<void(const std::string& folder)>& removed);

}  // namespace nvme
