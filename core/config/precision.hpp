// The keys about precision: dtypes of weights and gradients, and the loss scale.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/config.hpp"

namespace zr::host {

/// Dtypes of a job (docs/numerics.md, sections 2, 4 and 10).
struct Precision {
  zr_dtype weights;            // weights, and everything that autograd computes
  zr_dtype gradients;          // gradients of one backward, as they are communicated
  zr_dtype reduced_gradients;  // sums over micro-batches and ranks
};
/// Reads train.dtype, gradients.reduce_dtype, gradients.dtype and gradients.reduce.
Precision precision_of(const JobConfig& config);

/// The largest loss scale: far above the range of fp16 gradients, far below the overflow of fp32.
inline constexpr double kMaxLossScale = 0x1p64;

/// Keys that contradict each other or must be a power of two: pairs of the key and its problem.
std::vector<std::pair<std::string, std::string>> precision_problems(const JobConfig& config);

}  // namespace zr::host
