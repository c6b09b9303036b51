// Samples of weights, to detect writes through raw pointers, which libtorch's version counters do not count.
#pragma once

#include <cstdint>
#include <vector>

#include "update/update.hpp"

namespace zr::host::engine {

/// Compares the first, middle and last 16 elements of each slice's weights with their values at the last remember().
/// This detects that a tensor was overwritten, but may miss a write to a few elements. Training thread only.
class WeightSamples {
 public:
  WeightSamples() = default;
  /// `slices`: slices with weights in memory; they outlive the object.
  explicit WeightSamples(std::vector<const update::UpdateSlice*> slices);
  /// Takes new samples. Call after the engine wrote weights.
  void remember();
  /// The slices whose samples differ from those of the last remember().
  std::vector<const update::UpdateSlice*> changed() const;

 private:
  std::vector<const update::UpdateSlice*> slices_;
  std::vector<char> values_;
};

}  // namespace zr::host::engine
