// Who may have written a plug-in: its code runs with the user's rights. Inside core/plugin.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace zr::host {

/// What a file was when it was checked.
struct TrustedFile {
  std::filesystem::path path;  // resolved: no component is a link
  dev_t device = 0;
  ino_t inode = 0;
};

/// Follows `file` (absolute) from / as the kernel would and checks every component on the way, links included. "" and
/// `found`, or why its code must not run, with the remedy. A component passes if
///  - its owner is root, the effective user, or the owner of the running program or of the library that holds this
///    code (their code runs already); and
///  - nobody else can write it: not the world, nor a group other than the owner's private one (the group has the
///    owner's name, and every user it has is trusted as an owner is); no group if the file has an access control list.
///    A folder with the sticky bit may be written by others (/tmp): they cannot replace what trusted users own there.
/// Any thread.
std::string trust_problem(const std::filesystem::path& file, TrustedFile& found);

/// `file` is still what trust_problem() found.
bool is_unchanged(const TrustedFile& file);

}  // namespace zr::host
