// A run of the parity tests as the reference needs it: the settings of the job that can affect its results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

namespace parity {

struct Recipe {
  std::string model = "everything", optimizer = "adamw", dtype = "fp32";
  int micro_batches = 1;                                // per step, over all ranks
  int ranks = 1;                                        // affects results if `last`, or if gradient_dtype is not fp32
  bool last = false;                                    // gradients.reduce = "last_micro_step"
  std::string gradient_dtype = "fp32", reduce_dtype;    // gradients.dtype, gradients.reduce_dtype (empty: not rounded)
  int scale_power = 16, window = 1000, hysteresis = 2;  // of the loss scale under fp16
  int steps = 3;
  double clip = 0;  // 0: off
  double lr = 0.05;
  uint64_t seed = 7;      // of training and of building the model
  bool weighted = false;  // micro-batch m has the weight m + 1
  int threads = 1;        // of libtorch: sums in matrix products depend on them
  bool trace = false;     // keep the weights after every step, not only after the last
  std::string keeps;      // the beginnings of names of parameters that keep fp32, separated by commas
  bool rounds_buffers = true;
  bool backwards = false;  // an intended defect: adds micro-batches from the last to the first

  /// Whether a parameter keeps fp32.
  bool keeps_fp32(const std::string& name) const {
    for (std::size_t at = 0; at < keeps.size();) {
      const std::size_t end = std::min(keeps.find(',', at), keeps.size());
      if (name.starts_with(keeps.substr(at, end - at))) return true;
      at = end + 1;
    }
    return false;
  }
  /// The values that the results depend on.
  auto words() const {
    const bool by_rank = last || gradient_dtype != "fp32";
    return std::tuple(model, optimizer, dtype, micro_batches, by_rank ? ranks : 0, last, gradient_dtype, reduce_dtype,
                      scale_power, window, hysteresis, steps, clip, lr, seed, weighted, threads, trace, keeps,
                      rounds_buffers, backwards);
  }
  /// The order for std::map.
  bool operator<(const Recipe& other) const { return words() < other.words(); }
};

}  // namespace parity
