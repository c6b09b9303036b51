// The tile pipeline: unscale, clip, step and downcast of the owned shard in one pass, cut into tiles over the rank's
// threads.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/optimizer.h"

namespace zr::host {

/// One run of a parameter that this rank updates, with the memory it stands in.
struct UpdateSlice {
  uint32_t param;
  int64_t first, count;
  zr_view weight;  // all views hold `count` elements, slots of blocks fewer
  zr_view master;  // count 0: the weight is its own
  zr_view grad;    // fp32, or narrower: the optimizer is then given a widened copy
  std::vector<zr_view> slots;
  int64_t state = 0;  // its first element in the plan's state space
  int tier = 0;       // of the plan, where master and slots stand; those on disk have no data here
};

/// What a step's slices have in common, and what differs by parameter.
struct UpdateInput {
  float grad_mul;
  int64_t step;  // of the job, 1 at the first
  double grad_norm;
  const std::vector<int64_t>* steps;  // by parameter: the number of this update, 1 at the first
  const std::vector<double>* rates;   // by parameter: learning rate
  const std::vector<char>* touched;   // by parameter: 0 is left alone
  bool staged = false;  // states are off the device: sums and weights come to them, and weights go back, in copies
};

/// Calls the optimizer over all touched slices. Elementwise optimizers get tiles of at most 64 Ki elements (16 Ki where
/// sums or weights are copied), several threads at once; others whole slices. Throws Failure if the plug-in does.
void update(const Instance& optimizer, uint32_t granularity, ThreadPool& pool, const MemoryPlan& plan,
            const std::vector<UpdateSlice>& slices, const UpdateInput& input);

}  // namespace zr::host
