// Checks who can write a plug-in, because its code runs with the user's rights. Internal to core/plugin.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "plugin/plugin.hpp"

namespace zr::host::plugin {

/// The identity of a file when it was checked.
struct TrustedFile {
  std::filesystem::path path;  // resolved: no component is a link
  dev_t device = 0;
  ino_t inode = 0;
};

/// Resolves `file` (absolute) from / as the kernel does, and checks every component, links included. Returns "" and
/// sets `found`; or returns why the code must not run, with the remedy. A component passes if
///  - its owner is root, the effective user, or the owner of the running program or of the library that holds this
///    code (their code runs already); and
///  - no other user can write it: neither the world, nor a group other than the owner's private one (the group has the
///    owner's name, and all its users are trusted owners); no group at all if the file has an access control list.
///    A folder with the sticky bit may be written by others (/tmp): they cannot replace what trusted users own there.
/// `rejection` gets the cause, with all components that the same remedy applies to. Any thread.
std::string trust_problem(const std::filesystem::path& file, TrustedFile& found, Rejection* rejection = nullptr);

/// True if `file` is still the file that trust_problem() found.
bool is_unchanged(const TrustedFile& file);

}  // namespace zr::host::plugin
