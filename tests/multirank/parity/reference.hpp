// The reference: one process, plain libtorch, a scalar optimizer. Written from NUMERICS.md alone; shares no code with
// the host.
#pragma once

#include <cstdint>
#include <string>

#include "multirank/parity/features.hpp"
#include "multirank/parity/outcome.hpp"

namespace parity {

struct Recipe {
  std::string model = "everything", optimizer = "adamw", dtype = "fp32";
  int micro_batches = 1;               // M of a step
  int ranks = 1;                       // N: enters where sums are narrow, or gradients are held
  std::string sums = "fp32", travels;  // gradients.dtype, and what gradients are rounded to before; empty: as they are
  int scale_power = 16, window = 1000, hysteresis = 2;  // of the loss scale, with fp16
  int steps = 3;
  double clip = 0;  // 0: off
  double lr = 0.05;
  uint64_t seed = 7;       // of training; the model is built with the same
  bool weighted = false;   // micro-batch m counts m + 1
  bool last = false;       // gradients.reduce = "last" (NUMERICS.md 5), not "each"
  bool backwards = false;  // a seeded defect: micro-batches folded from the last to the first
};

Outcome reference(const Recipe& recipe);

}  // namespace parity
