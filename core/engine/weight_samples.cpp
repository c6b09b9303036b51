#include "engine/weight_samples.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zr::host::engine {

namespace {
constexpr int64_t kRange = 16, kRanges = 3;

// Calls fn(weights, count) for the sampled ranges of a slice; the count is the same on every call for a slice.
template <class F>
void for_each_range(const update::UpdateSlice& slice, F&& fn) {
  const auto* weights = static_cast<const uint16_t*>(slice.weight.data);
  const int64_t length = std::min(kRange, slice.count);
  for (const int64_t first : {int64_t{0}, (slice.count - length) / 2, slice.count - length})
    fn(weights + first, length);
}
}  // namespace

WeightSamples::WeightSamples(std::vector<const update::UpdateSlice*> slices)
    : slices_(std::move(slices)), values_(slices_.size() * kRange * kRanges) {
  remember();
}

void WeightSamples::remember() {
  uint16_t* to = values_.data();
  for (const update::UpdateSlice* slice : slices_)
    for_each_range(*slice, [&](const uint16_t* weights, int64_t count) {
      std::memcpy(to, weights, static_cast<std::size_t>(count) * sizeof *to);
      to += kRange;
    });
}

std::vector<const update::UpdateSlice*> WeightSamples::changed() const {
  std::vector<const update::UpdateSlice*> slices;
  const uint16_t* seen = values_.data();
  for (const update::UpdateSlice* slice : slices_) {
    bool differs = false;
    for_each_range(*slice, [&](const uint16_t* weights, int64_t count) {
      differs |= std::memcmp(seen, weights, static_cast<std::size_t>(count) * sizeof *seen) != 0;
      seen += kRange;
    });
    if (differs) slices.push_back(slice);
  }
  return slices;
}

}  // namespace zr::host::engine
