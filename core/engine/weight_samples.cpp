#include "engine/weight_samples.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace zr::host {

namespace {
constexpr int64_t kRun = 16, kRuns = 3;

// Calls fn(weights, count) for the runs of a unit; the count is the same on every call for a unit.
template <class F>
void each_run(const Unit& unit, F&& fn) {
  const auto* weights = static_cast<const uint16_t*>(unit.weight.data);
  const int64_t run = std::min(kRun, unit.count);
  for (const int64_t first : {int64_t{0}, (unit.count - run) / 2, unit.count - run}) fn(weights + first, run);
}
}  // namespace

WeightSamples::WeightSamples(std::vector<const Unit*> units)
    : units_(std::move(units)), values_(units_.size() * kRun * kRuns) {
  remember();
}

void WeightSamples::remember() {
  uint16_t* to = values_.data();
  for (const Unit* unit : units_)
    each_run(*unit, [&](const uint16_t* weights, int64_t count) {
      std::memcpy(to, weights, static_cast<std::size_t>(count) * sizeof *to);
      to += kRun;
    });
}

std::vector<const Unit*> WeightSamples::changed() const {
  std::vector<const Unit*> units;
  const uint16_t* seen = values_.data();
  for (const Unit* unit : units_) {
    bool differs = false;
    each_run(*unit, [&](const uint16_t* weights, int64_t count) {
      differs |= std::memcmp(seen, weights, static_cast<std::size_t>(count) * sizeof *seen) != 0;
      seen += kRun;
    });
    if (differs) units.push_back(unit);
  }
  return units;
}

}  // namespace zr::host
