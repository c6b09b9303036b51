// Unscales, clips, updates and downcasts the owned shard in one pass over update slices, on the rank's threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/device_memory.hpp"
#include "base/draft_abi.hpp"
#include "base/thread_pool.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/optimizer.h"

namespace zr::host::update {

/// A range of a parameter that this rank updates, with its memory.
struct UpdateSlice {
  uint32_t param;
  int64_t first, count;
  zr_view weight;  // all views have `count` elements; slots per block have fewer
  zr_view master;  // count 0: the fp32 weight is its own master
  zr_view grad;    // fp32 or narrower; the optimizer gets an upcast copy of narrower ones
  std::vector<zr_view> slots;
  int64_t state_offset = 0;  // first element in the plan's state space
  int tier = 0;              // tier of master and slots in the plan; their views have no data if it is a disk
};

/// Elements [skip, skip + count) of a slice, where its parameter may be cut.
UpdateSlice slice_part(const plan::MemoryPlan& plan, const UpdateSlice& slice, int64_t skip, int64_t count);

/// An optimizer of the job, and its functions for sums over parameters; null: it has none.
struct Optimizer {
  const plugin::Instance* instance;
  const zr_partial_sums_api* partial_sums;
};

/// The sums over parameters, for optimizers that need them. Any thread may call the functions.
struct SumAccess {
  std::function<double*(uint32_t param, int64_t first)> partial;  // of the block at this element and those after it
  std::function<const double*(uint32_t param)> totals;            // of earlier passes
};

/// The arguments of a step: common to all slices, or per parameter.
struct UpdateInput {
  float grad_mul;
  int64_t step;  // of the job; the first is 1
  double grad_norm;
  const std::vector<int64_t>* steps;  // per parameter: the number of this update; the first is 1
  const std::vector<double>* rates;   // per parameter: learning rate
  const std::vector<char>* touched;   // per parameter: 0 means no update
  /// New weights are stored at the begin of each part's gradients, whose elements must not be smaller; weights stay as
  /// they are until adopt_weights() copies the new ones.
  bool keeps_weights = false;
  SumAccess sums = {};
};

/// Calls each parameter's optimizer over all touched slices, on several threads, in parts of 64 Ki elements (16 Ki
/// where gradients are upcast or weights are kept), or as many as the optimizer needs complete. `optimizers`: those of
/// the job, by plan::Parameter::optimizer. Throws Error if a plug-in fails.
void update(const std::vector<Optimizer>& optimizers, ThreadPool& pool, const plan::MemoryPlan& plan,
            const std::vector<UpdateSlice>& slices, const UpdateInput& input);

/// Enqueues the updates of all touched slices in memory of the device, one call per optimizer. Gradients are fp32.
/// Throws Error if a plug-in fails.
void update_on_device(const std::vector<Optimizer>& optimizers, DeviceMemory& device, const plan::MemoryPlan& plan,
                      const std::vector<UpdateSlice>& slices, const UpdateInput& input);

/// Copies the weights that update() with input.keeps_weights stored. The other arguments must be those of that update.
void adopt_weights(ThreadPool& pool, const plan::MemoryPlan& plan, const std::vector<UpdateSlice>& slices,
                   const UpdateInput& input);

/// As update(), for one pass before the update: adds up the sums of the slices' blocks. input.touched: the parameters
/// that have this pass. Weights are not changed.
void add_up(const std::vector<Optimizer>& optimizers, ThreadPool& pool, const plan::MemoryPlan& plan,
            const std::vector<UpdateSlice>& slices, const UpdateInput& input, uint32_t pass);

}  // namespace zr::host::update
