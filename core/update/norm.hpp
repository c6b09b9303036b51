// The gradient norm, NUMERICS.md 7: sums of squares in double over leaves of 1024 elements, in a fixed lane order.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.hpp"
#include "zr/abi/base.h"

namespace zr::host {

/// Lanes of a leaf: element i goes to lane i % 16; the lanes are added in ascending order.
inline constexpr int kLanes = 16;

/// Sum of squares of each leaf of `values` (fp32, bf16 or fp16), which start at a leaf's edge: out[(count + 1023) /
/// 1024]. Squares of fp32 are exact in double, so that a sum is finite exactly if all its elements are.
void norm_block_sums(const zr_view& values, double* out);
/// One call of it.
struct NormBlockRun {
  zr_view values;
  double* out;
};
/// Many of them, spread over the pool.
void norm_block_sums(ThreadPool& pool, const std::vector<NormBlockRun>& runs);
/// Elements of `values` (fp32, bf16 or fp16) that are infinite or not a number.
int64_t count_non_finite(const zr_view& values);

}  // namespace zr::host
