// The gradient norm, NUMERICS.md 7: sums of squares in double over leaves of 1024 elements, in a fixed lane order.
#pragma once

#include <cstdint>
#include <vector>

#include "base/pool.hpp"

namespace zr::host {

/// Lanes of a leaf: element i goes to lane i % 16; the lanes are added in ascending order.
inline constexpr int kLanes = 16;

/// Sum of squares of each leaf of `count` elements starting at a leaf's edge: out[(count + 1023) / 1024]. Squares of
/// fp32 are exact in double, so that a sum is finite exactly if all its elements are.
void leaf_sums(const float* values, int64_t count, double* out);
/// One call of it.
struct LeafRun {
  const float* values;
  int64_t count;
  double* out;
};
/// Many of them, spread over the pool.
void leaf_sums(Pool& pool, const std::vector<LeafRun>& runs);
/// Elements of values[0, count) that are infinite or not a number.
int64_t count_non_finite(const float* values, int64_t count);

}  // namespace zr::host
