// The gradient norm (docs/numerics.md, section 7): sums of squares in double over norm blocks of 1024 elements, in a
// fixed lane order.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.hpp"
#include "zr/abi/base.h"

namespace zr::host::update {

/// Lanes of a norm block: element i goes to lane i % 16; the lanes are added in ascending order.
inline constexpr int kLanes = 16;

/// Sum of squares of each norm block of `values` (fp32, bf16 or fp16), which begin at the start of a norm block:
/// out[(count + 1023) / 1024]. Squares of fp32 are exact in double, so a sum is finite exactly if all its elements are.
void norm_block_sums(const zr_view& values, double* out);
/// The arguments of one norm_block_sums() call.
struct NormBlockRange {
  zr_view values;
  double* out;
};
/// Computes many ranges, in parallel on the pool.
void norm_block_sums(ThreadPool& pool, const std::vector<NormBlockRange>& ranges);
/// Computes the sums of fp32 values, not of their squares, per norm block of many ranges, in parallel on the pool.
void block_sums(ThreadPool& pool, const std::vector<NormBlockRange>& ranges);
/// Number of elements of `values` (fp32, bf16 or fp16) that are infinite or NaN.
int64_t count_non_finite(const zr_view& values);

}  // namespace zr::host::update
