// The three batch numbers: any two give the third. Inside core/config.
#pragma once

#include <string>

#include "config/config.hpp"

namespace zr::host {

/// Fills what was not given (0) so that global = micro * accumulation * world. Returns what is wrong, with the
/// arithmetic and both places, or "".
std::string derive_batch(Entry& global, Entry& micro, Entry& accumulation, int64_t world);

}  // namespace zr::host
