#include "engine/weight_samples.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zr::host::engine {

namespace {
constexpr int64_t kRun = 16, kRuns = 3;

// Calls fn(weights, count) for the runs of a slice; the count is the same on every call for a slice.
template <class F>
void each_run(const update::UpdateSlice& slice, F&& fn) {
  const auto* weights = static_cast<const uint16_t*>(slice.weight.data);
  const int64_t run = std::min(kRun, slice.count);
  for (const int64_t first : {int64_t{0}, (slice.count - run) / 2, slice.count - run}) fn(weights + first, run);
}
}  // namespace

WeightSamples::WeightSamples(std::vector<const update::UpdateSlice*> slices)
    : slices_(std::move(slices)), values_(slices_.size() * kRun * kRuns) {
  remember();
}

void WeightSamples::remember() {
  uint16_t* to = values_.data();
  for (const update::UpdateSlice* slice : slices_)
    each_run(*slice, [&](const uint16_t* weights, int64_t count) {
      std::memcpy(to, weights, static_cast<std::size_t>(count) * sizeof *to);
      to += kRun;
    });
}

std::vector<const update::UpdateSlice*> WeightSamples::changed() const {
  std::vector<const update::UpdateSlice*> slices;
  const uint16_t* seen = values_.data();
  for (const update::UpdateSlice* slice : slices_) {
    bool differs = false;
    each_run(*slice, [&](const uint16_t* weights, int64_t count) {
      differs |= std::memcmp(seen, weights, static_cast<std::size_t>(count) * sizeof *seen) != 0;
      seen += kRun;
    });
    if (differs) slices.push_back(slice);
  }
  return slices;
}

}  // namespace zr::host::engine
