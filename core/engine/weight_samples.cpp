#include "engine/weight_samples.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/dtype.hpp"

namespace zr::host::engine {

namespace {
constexpr int64_t kRange = 16, kRanges = 3;
constexpr std::size_t kRangeBytes = kRange * sizeof(float);  // at most

// Calls fn(memory, bytes) for the sampled ranges of a slice; the sizes are the same on every call for a slice.
template <class F>
void for_each_range(const update::UpdateSlice& slice, F&& fn) {
  const int64_t size = size_of(slice.weight.dtype), length = std::min(kRange, slice.count);
  for (const int64_t first : {int64_t{0}, (slice.count - length) / 2, slice.count - length})
    fn(static_cast<const char*>(slice.weight.data) + first * size, static_cast<std::size_t>(length * size));
}
}  // namespace

WeightSamples::WeightSamples(std::vector<const update::UpdateSlice*> slices)
    : slices_(std::move(slices)), values_(slices_.size() * kRangeBytes * kRanges) {
  remember();
}

void WeightSamples::remember() {
  char* to = values_.data();
  for (const update::UpdateSlice* slice : slices_)
    for_each_range(*slice, [&](const char* weights, std::size_t bytes) {
      std::memcpy(to, weights, bytes);
      to += kRangeBytes;
    });
}

std::vector<const update::UpdateSlice*> WeightSamples::changed() const {
  std::vector<const update::UpdateSlice*> slices;
  const char* seen = values_.data();
  for (const update::UpdateSlice* slice : slices_) {
    bool differs = false;
    for_each_range(*slice, [&](const char* weights, std::size_t bytes) {
      differs |= std::memcmp(seen, weights, bytes) != 0;
      seen += kRangeBytes;
    });
    if (differs) slices.push_back(slice);
  }
  return slices;
}

}  // namespace zr::host::engine
