// Limits of a job that configuration and checkpoints share.
#pragma once

#include <cstdint>

namespace zr::host {

/// The largest number of steps, and of samples per step.
inline constexpr int64_t kMaxSteps = 2147483647;
/// The largest loss scale: far above the range of fp16 gradients, far below the overflow of fp32.
inline constexpr double kMaxLossScale = 0x1p64;

}  // namespace zr::host
