#include "update/norm.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

#include "base/dtype.hpp"
#include "plan/plan.hpp"
#include "update/cast.hpp"

// One source, compiled for several instruction sets; the lane order is fixed, so that all give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define ZR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZR_CLONES
#endif

namespace zr::host::update {

namespace {
ZR_CLONES double norm_block_sum(const float* values, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = values[i + lane];
      lanes[lane] += x * x;
    }
  for (int lane = 0; i + lane < count; ++lane) {
    const double x = values[i + lane];
    lanes[lane] += x * x;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

double block_sum(const float* values, int64_t count) {
  double lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i % kLanes] += static_cast<double>(values[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

ZR_CLONES int64_t non_finite_in_block(const float* values, int64_t count) {
  constexpr uint32_t kExponent = 0x7f800000;
  const auto is_non_finite = [](float x) { return (std::bit_cast<uint32_t>(x) & kExponent) == kExponent ? 1 : 0; };
  int32_t lanes[kLanes] = {};  // a loop of constant length over them is vectorized
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += is_non_finite(values[i + lane]);
  int64_t n = std::accumulate(lanes, lanes + kLanes, int64_t{0});
  for (; i < count; ++i) n += is_non_finite(values[i]);
  return n;
}

// Calls fn(fp32 values, count) for each block.
template <class F>
void for_each_norm_block(const zr_view& values, F&& fn) {
  float wide[plan::kNormBlock];
  for (int64_t first = 0; first < values.count; first += plan::kNormBlock) {
    const zr_view block = part_of(values, first, std::min(plan::kNormBlock, values.count - first));
    if (block.dtype != ZR_F32) upcast(block.data, block.dtype, block.count, wide);
    fn(block.dtype == ZR_F32 ? static_cast<const float*>(block.data) : wide, block.count);
  }
}
// Calls fn(part of a range) on the pool.
template <class F>
void for_each_part(ThreadPool& pool, const std::vector<NormBlockRange>& ranges, const F& fn) {
  std::vector<NormBlockRange> parts;  // cut to a size that spreads over many threads
  constexpr int64_t kPart = 64 * plan::kNormBlock;
  for (const NormBlockRange& range : ranges)
    for (int64_t first = 0; first < range.values.count; first += kPart)
      parts.push_back({part_of(range.values, first, std::min(kPart, range.values.count - first)),
                       range.out + first / plan::kNormBlock});
  pool.parallel_for(static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fn(parts[static_cast<std::size_t>(i)]);
  });
}
}  // namespace

void norm_block_sums(const zr_view& values, double* out) {
  for_each_norm_block(values, [&](const float* block, int64_t count) { *out++ = norm_block_sum(block, count); });
}

void norm_block_sums(ThreadPool& pool, const std::vector<NormBlockRange>& ranges) {
  for_each_part(pool, ranges, [](const NormBlockRange& part) { norm_block_sums(part.values, part.out); });
}

void block_sums(ThreadPool& pool, const std::vector<NormBlockRange>& ranges) {
  for_each_part(pool, ranges, [](const NormBlockRange& part) {
    double* out = part.out;
    for_each_norm_block(part.values, [&](const float* block, int64_t count) { *out++ = block_sum(block, count); });
  });
}

int64_t count_non_finite(const zr_view& values) {
  int64_t n = 0;
  for_each_norm_block(values, [&](const float* block, int64_t count) { n += non_finite_in_block(block, count); });
  return n;
}

}  // namespace zr::host::update
