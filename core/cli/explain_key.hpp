// `zeroth explain FILE KEY`: what a file says about one key.
#pragma once

#include <string>

#include "cli/job_file.hpp"

namespace zr::host::cli {

/// Value, origin, type, range, default and meaning of the key `path`, and its values in [[optimizer.groups]]. A key of
/// a schedule or plug-in that the file does not select has a reason instead of a value. Throws UserError with the
/// nearest name if neither Zeroth, a plug-in nor the program has this key.
std::string explain_key(const JobFile& job, const plugin::Registry& registry, const std::string& path);

}  // namespace zr::host::cli
