// Finds fused multiply-add instructions by running code one instruction at a time.
#pragma once

#include <functional>
#include <string>

#include "conform/library.hpp"

namespace zr::conform {

/// Runs fn in a traced process. Returns a sentence about the first fused multiply-add instruction of the library that
/// is executed; "" if no such instruction is. Skips the rule if this machine has no such tracing.
std::string find_fused_multiply_add(const Library& library, const std::function<void()>& fn);

}  // namespace zr::conform
