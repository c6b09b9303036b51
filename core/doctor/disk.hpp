// The folders that a job writes to, and their file systems.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "doctor/check.hpp"
#include "doctor/needs.hpp"

namespace zr::host::doctor {

/// The file system of a folder.
struct FileSystemFacts {
  std::string mount, type;  // "/", "ext4"; "" if unknown
};
/// The mount of an existing path with its links resolved, by the longest mount point in the text of
/// /proc/self/mountinfo.
FileSystemFacts file_system_in(const std::string& mountinfo, const std::string& path);
/// file_system_in() for the mounts of this process. Does not access the path's file system.
FileSystemFacts file_system_facts(const std::string& path);

enum class FolderUse {
  output,      // created if it does not exist
  checkpoint,  // the same
  offload      // must exist
};

/// A folder that a job writes to.
struct FolderFacts {
  std::string name, path;  // "checkpoint folder", as in the TOML file
  FolderUse use = FolderUse::output;
  std::string existing{};  // the folder, or its nearest parent that exists
  int error = 0;           // why that cannot be accessed (errno)
  FileSystemFacts file_system{};
  int64_t size = 0, free = 0;
  int write_error = 0;                // 0: this user can write there
  bool foreign = false;               // it belongs to another user
  std::optional<int> direct_error{};  // of an O_DIRECT write; of offload folders only
};
/// Examines a folder. For an offload folder, writes one block to a file that has no name, so that nothing remains.
FolderFacts folder_facts(const std::string& name, const std::string& path, FolderUse use);
/// One line about the folder, and one about O_DIRECT. Without a TOML file, a folder that cannot be used is a warning:
/// a job may be started in another one.
Checks folder_checks(const FolderFacts& facts, const JobNeeds& needs, bool is_root);

}  // namespace zr::host::doctor
