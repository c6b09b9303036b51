// The rule for values that are paths. Internal to core/config.
#pragma once

#include <string>

#include "config/config.hpp"

namespace zr::host::config {

/// Makes the value of a key with a PathKind absolute; `written` and `given_path` keep the text that was given. A value
/// of the file is relative to `file_folder`; any other one to the working directory. "~" and
/// "~/..." start at the home folder, "~name" at that of the user. Other keys and the value "" stay as they are. Returns
/// the problem ("there is no user 'x'"), or "".
std::string resolve_path_value(Entry& entry, const std::string& file_folder);

}  // namespace zr::host::config
