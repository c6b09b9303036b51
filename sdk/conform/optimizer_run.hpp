// An instance of an optimizer, and updates of parameters as the host makes them: passes, sums of blocks, slices.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "conform/library.hpp"
#include "conform/optimizer_parameter.hpp"
#include "zr/abi/optimizer.h"

struct zr_partial_sums_api;  // zr/abi/draft/partial_sums.h

namespace zr::conform {

/// How the slices of a parameter are updated.
struct UpdateOptions {
  Mode mode{};
  Cuts cuts{};  // empty: one slice of all elements
  uint32_t group = 0, unknown_flags = 0;
  float grad_mul = 0.5f;
  int64_t step = 1;      // of the parameter
  int64_t job_step = 0;  // of the job; 0: equal to `step`
  double lr = 3e-3, grad_norm = 1.5;
  Completion* done = nullptr;
  bool one_call = true;  // of step() for all slices; else one call per slice
  // The dtype of the weight view of the last slice, if it is not the true one; from this pass on.
  zr_dtype claimed_dtype = ZR_NONE;
  uint32_t claimed_pass = 0;
  // Filled with the sums of all blocks, pass by pass, if not null.
  std::vector<double>* block_sums = nullptr;
};

/// One parameter of an update.
struct ParameterUpdate {
  ParameterArrays* arrays;
  UpdateOptions options{};
};

/// An instance and its calls.
class OptimizerRun {
 public:
  OptimizerRun(Case& test, TestHost& host) : OptimizerRun(test, host, Instance::values_for(test)) {}
  OptimizerRun(Case& test, TestHost& host, const KeyValues& values);
  /// Uses an instance that lives longer.
  explicit OptimizerRun(Instance& instance);
  /// Describes a parameter: describe(), and passes() if the optimizer has it. Fails if a call fails.
  Description describe(const Shape& shape, const Mode& mode = {}, uint32_t group = 0, uint32_t flags = 0) const;
  /// Describes a parameter, as describe(); nothing if the optimizer returns ZR_UNSUPPORTED.
  std::optional<Description> describe_if_supported(const Shape& shape, const Mode& mode = {}, uint32_t group = 0,
                                                   uint32_t flags = 0) const;
  /// The shapes of `shapes` that the optimizer supports. Skips the rule if there are none.
  std::vector<Shape> supported(const std::vector<Shape>& shapes) const;
  /// Arrays for a parameter that the optimizer has described.
  ParameterArrays arrays(const ParameterArrays::Layout& layout, std::mt19937_64 random, uint32_t group = 0) const;
  /// Adds a group with these values.
  Answer add_group(uint32_t group, const KeyValues& values) const;
  /// Updates all elements, or the slices of options.cuts.
  Answer try_update(ParameterArrays& arrays, const UpdateOptions& options = {}) const;
  /// As try_update(); fails if the call fails.
  void update(ParameterArrays& arrays, const UpdateOptions& options = {}) const;
  Instance& instance() const { return instance_; }
  /// The functions for sums over parameters, or null.
  const zr_partial_sums_api* sums_api() const { return sums_api_; }
  const zr_optimizer_api& api() const { return api_; }

 private:
  std::unique_ptr<Instance> own_;
  Instance& instance_;
  const zr_optimizer_api& api_;
  const zr_partial_sums_api* sums_api_;
};

/// Updates parameters as a step of the host does: each pass over all parameters, then their updates; slices of
/// parameters without passes are in one call. Slice i is updated by the instance i modulo their number: they are ranks.
Answer update_parameters(const std::vector<const OptimizerRun*>& ranks, const std::vector<ParameterUpdate>& updates);
/// Three updates of the same parameters, with new gradients, so that the states matter; fails if a call fails.
void three_steps(const std::vector<const OptimizerRun*>& ranks, const std::vector<ParameterUpdate>& updates);

}  // namespace zr::conform
