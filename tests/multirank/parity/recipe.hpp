// What a run of the parity tests is, for the reference: the same words as the job's, without how it is spread.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

namespace parity {

struct Recipe {
  std::string model = "everything", optimizer = "adamw", dtype = "fp32";
  int micro_batches = 1;               // M of a step
  int ranks = 1;                       // N: counts where `last`, and where sums are narrow
  bool last = false;                   // gradients.reduce = "last_micro_step" (docs/numerics.md 5)
  std::string sums = "fp32", travels;  // gradients.dtype, and what gradients are rounded to before; empty: as they are
  int scale_power = 16, window = 1000, hysteresis = 2;  // of the loss scale, with fp16
  int steps = 3;
  double clip = 0;  // 0: off
  double lr = 0.05;
  uint64_t seed = 7;       // of training; the model is built with the same
  bool weighted = false;   // micro-batch m counts m + 1
  int threads = 1;         // libtorch's: matrix sums depend on them
  bool trace = false;      // keep the weights after every step, not only after the last
  bool backwards = false;  // a seeded defect: micro-batches folded from the last to the first

  /// What a result depends on.
  auto words() const {
    const bool by_rank = last || sums != "fp32";
    return std::tuple(model, optimizer, dtype, micro_batches, by_rank ? ranks : 0, last, sums, travels, scale_power,
                      window, hysteresis, steps, clip, lr, seed, weighted, threads, trace, backwards);
  }
  /// An order, for maps.
  bool operator<(const Recipe& other) const { return words() < other.words(); }
};

}  // namespace parity
