// The keys about numbers: which element type stands where, and the loss scale's.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/config.hpp"

namespace zr::host {

/// Element types of a job (NUMERICS.md 2, 4, 10).
struct Precision {
  zr_dtype weights;            // and of what autograd computes
  zr_dtype gradients;          // of one backward, as they travel
  zr_dtype reduced_gradients;  // of gradients, over micro-batches and ranks
};
/// From train.dtype, gradients.reduce_dtype and gradients.dtype.
Precision precision_of(const JobConfig& config);

/// The most a loss scale can be: far above what fp16 gradients bear, far below what fp32 overflows at.
inline constexpr double kMaxLossScale = 0x1p64;

/// Keys that contradict one another, or are no power of two where they must be: the key and what is wrong with it.
std::vector<std::pair<std::string, std::string>> precision_problems(const JobConfig& config);

}  // namespace zr::host
