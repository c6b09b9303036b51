// Rounding to multiples, from the SDK.
#pragma once

#include "zr/round_up.hpp"

namespace zr::host {

using zr::round_up;

}  // namespace zr::host
