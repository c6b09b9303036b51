#include "shard/norm.hpp"

#include <algorithm>
#include <cmath>

#include "plan/plan.hpp"

// One source, compiled for several processors; the lanes are fixed, so that all of them give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define ZR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZR_CLONES
#endif

namespace zr::host {

namespace {
ZR_CLONES double leaf_sum(const float* values, int64_t count) {
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
}  // namespace

void leaf_sums(const float* values, int64_t count, double* out) {
  for (int64_t first = 0; first < count; first += kLeaf)
    *out++ = leaf_sum(values + first, std::min(kLeaf, count - first));
}

void leaf_sums(Pool& pool, const std::vector<LeafRun>& runs) {
  std::vector<LeafRun> parts;  // of a size that many threads can share
  constexpr int64_t kPart = 64 * kLeaf;
  for (const LeafRun& run : runs)
    for (int64_t first = 0; first < run.count; first += kPart)
      parts.push_back({run.values + first, std::min(kPart, run.count - first), run.out + first / kLeaf});
  pool.parallel_for(static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const LeafRun& part = parts[static_cast<std::size_t>(i)];
      leaf_sums(part.values, part.count, part.out);
    }
  });
}

int64_t count_non_finite(const float* values, int64_t count) {
  return std::count_if(values, values + count, [](float x) { return !std::isfinite(x); });
}

}  // namespace zr::host
