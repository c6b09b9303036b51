// Time limits that an environment variable sets.
#pragma once

namespace zr::host {

/// The seconds in the environment variable `name`; `otherwise` if it is not set. Throws UserError unless it is more
/// than 0 and at most 86400 (a day). [any]
double seconds_of_variable(const char* name, double otherwise);

}  // namespace zr::host
