// The three batch numbers: any two give the third. Inside core/config.
#pragma once

#include <string>

#include "config/config.hpp"

namespace zr::host::config {

/// Derives the numbers that are not given (0) so that global = micro * accumulation * world. If fewer than two are
/// given, accumulation is 1, and micro follows from global or is 1. Returns the problem, with the arithmetic and the
/// origins of the numbers, or "".
std::string derive_batch(Entry& global, Entry& micro, Entry& accumulation, int64_t world);

}  // namespace zr::host::config
