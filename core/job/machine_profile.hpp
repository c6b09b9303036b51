// The disk measurements of `zeroth tune` on this machine: stored in a small file, and offered to tiers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugin/plugin_host.hpp"

namespace zr::host::job {

/// A file system: its device, and the highest folder above a path that is still on that device.
struct FileSystem {
  std::string mount;
  uint64_t device = 0;
  bool operator==(const FileSystem&) const = default;
};
/// The file system of an existing path. Throws UserError if the path cannot be accessed.
FileSystem file_system_of(const std::string& path);

/// Measurements of one file system; rates in bytes per second.
struct DiskProfile {
  FileSystem file_system;
  int64_t block_bytes = 0, depth = 0;
  double read = 0, write = 0, mixed = 0;
  std::string date;
  std::string disturbance{};  // what other processes did meanwhile that may have slowed it; "": nothing
};

/// The measured file systems of this machine.
class MachineProfile {
 public:
  /// ZR_MACHINE_PROFILE, else zeroth/machine.json in XDG_CACHE_HOME or ~/.cache; "" without a home folder.
  static std::string default_file();
  /// Reads the file. The profile is empty if the file does not exist, or is invalid; an invalid file is reported in one
  /// warning per process.
  explicit MachineProfile(std::string file = default_file());

  /// The measurements of a file system; null: it was not measured.
  const DiskProfile* find(const FileSystem& file_system) const;
  /// Adds measurements; replaces those of the same mount point.
  void put(DiskProfile profile);
  /// All of them, in the order of measurement.
  const std::vector<DiskProfile>& disks() const { return disks_; }
  /// Removes the measurements of the file system that is mounted on `mount`. Returns whether there were some.
  bool forget(const std::string& mount);
  /// Writes the file atomically, and creates its folders. Throws EnvironmentError.
  void save() const;
  const std::string& file() const { return file_; }

 private:
  std::string file_;
  std::vector<DiskProfile> disks_;
};

/// Offers the service "zr.host.machine/1" to plug-ins. Each request of a plug-in reads the file.
void offer_machine_profile(plugin::PluginHost& host);

}  // namespace zr::host::job
