// What `zeroth tune` measured of this machine's disks: kept in a small file, told to tiers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugin/plugin_host.hpp"

namespace zr::host {

/// A file system: the highest folder above a path that is still of its device, and the device.
struct FileSystem {
  std::string mount;
  uint64_t device = 0;
  bool operator==(const FileSystem&) const = default;
};
/// Of a path that exists. Throws Failure(user) for one that does not.
FileSystem file_system_of(const std::string& path);

/// One file system, measured; rates in bytes per second.
struct DiskProfile {
  FileSystem at;
  int64_t block_bytes = 0, depth = 0;
  double read = 0, write = 0, mixed = 0;
  std::string date;
};

class MachineProfile {
 public:
  /// ZR_MACHINE_PROFILE, else zeroth/machine.json in XDG_CACHE_HOME or ~/.cache; "" where there is no home.
  static std::string default_file();
  /// Reads it. No file: nothing is known; one that is not understood: a warning that names it, once, and likewise.
  explicit MachineProfile(std::string file = default_file());

  /// Null: that file system was not measured.
  const DiskProfile* find(const FileSystem& at) const;
  /// In the place of what stood for its mount point.
  void put(DiskProfile one);
  /// Written aside and renamed; folders are made. Throws Failure(environment).
  void save() const;
  const std::string& file() const { return file_; }

 private:
  std::string file_;
  std::vector<DiskProfile> disks_;
};

/// Offers "zr.host.machine/1"; the file is read when a plug-in asks.
void offer_machine_profile(PluginHost& host);

}  // namespace zr::host
