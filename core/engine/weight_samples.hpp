// Some elements of each 16-bit weight, to notice writes that no counter of the model sees: through raw pointers.
#pragma once

#include <cstdint>
#include <vector>

#include "update/update.hpp"

namespace zr::host {

/// Compares the first, middle and last 16 elements of each slice's weights with those at the last remember(). It finds
/// what overwrites a tensor, not a write to a few elements. Training thread.
class WeightSamples {
 public:
  WeightSamples() = default;
  /// `slices`: those of 16-bit weights in memory; they outlive it.
  explicit WeightSamples(std::vector<const UpdateSlice*> slices);
  /// What the weights hold now is what the engine wrote.
  void remember();
  /// Units whose weights were written to since then.
  std::vector<const UpdateSlice*> changed() const;

 private:
  std::vector<const UpdateSlice*> slices_;
  std::vector<uint16_t> values_;
};

}  // namespace zr::host
