// Rounding to multiples. Plug-ins have their own in zr/strategy.hpp.
#pragma once

#include <cstdint>

namespace zr::host {

/// The smallest multiple of `multiple` that is at least `n`; n >= 0, multiple > 0.
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace zr::host
