// Paths that users write: "~", and relative ones.
#pragma once

#include <string>

namespace zr::host {

/// `text` as an absolute path: "~" and "~/..." start at the home folder ($HOME, else that of this user), "~name" at
/// that of the user `name`, another relative path at the folder `base`. ".." is resolved through symbolic links, as the
/// kernel does. If the home folder is not known, sets `problem` and returns "". Any thread.
std::string absolute_path(const std::string& text, const std::string& base, std::string& problem);

/// Replaces a leading "~" or "~name" of a path on a command line by the home folder; other paths stay as they are.
/// Throws UserError if the home folder is not known. Shells expand "~" only at the beginning of a word.
std::string with_home(const std::string& text);

/// The absolute path of the folder that contains `file`.
std::string folder_of(const std::string& file);

}  // namespace zr::host
