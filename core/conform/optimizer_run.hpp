// An optimizer with one parameter, its gradient and its states, and the slices into which an update cuts it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "conform/library.hpp"
#include "zr/abi/optimizer.h"

namespace zr::host::conform {

/// The arrays of one parameter, with guard pages.
struct ParameterArrays {
  struct Layout {
    int64_t count = 0;
    zr_dtype weight_dtype = ZR_F32;
    std::size_t shift = 0;     // bytes by which every array is out of its alignment
    uint8_t undefined = 0x99;  // content of a low-precision weight on entry
  };
  /// Random weights, zeroed states. The same generator state gives the same weights for every layout.
  ParameterArrays(const Layout& layout, const std::vector<zr_slot>& slots, std::mt19937_64 random);
  void new_gradient();
  /// The bits of everything that an update writes.
  std::string bits() const;
  /// The bits of the fp32 weights: of the master if there is one.
  std::string master_bits() const { return master.content(); }
  /// Fails if a byte outside the arrays, or of the gradient, was written.
  void check_surroundings(const std::string& gradient_before) const;

  Layout layout;
  std::vector<zr_slot> slot_types;
  Array master, weight16, grad;  // weight16: empty for fp32 weights
  std::vector<Array> slots;

 private:
  float number();
  std::mt19937_64 random_;
};

/// A range of elements: first, count.
using Cuts = std::vector<std::pair<int64_t, int64_t>>;

struct UpdateOptions {
  Mode mode{};
  Cuts cuts{};  // empty: one slice of all elements
  uint32_t group = 0, unknown_flags = 0;
  float grad_mul = 0.5f;
  int64_t step = 1;
  Completion* done = nullptr;
  bool one_call = true;              // else one call per slice
  zr_dtype claimed_dtype = ZR_NONE;  // the dtype of the weight view, if it is not the true one
};

class OptimizerRun {
 public:
  OptimizerRun(Case& test, TestHost& host) : OptimizerRun(test, host, Instance::values_for(test)) {}
  OptimizerRun(Case& test, TestHost& host, const KeyValues& values);
  /// The states of a parameter of `count` elements. Skips the rule unless they have one element per element.
  std::vector<zr_slot> slots(int64_t count);
  /// Describes a parameter of `count` elements; fails if the call fails.
  zr_optimizer_desc describe(const Mode& mode = {}, int64_t count = 1000, uint32_t group = 0, uint32_t flags = 0);
  /// Adds a group with these values.
  Answer add_group(uint32_t group, const KeyValues& values);
  /// Updates all elements, or the slices of options.cuts.
  Answer try_update(ParameterArrays& arrays, const UpdateOptions& options = {});
  /// The same; fails if the call fails.
  void update(ParameterArrays& arrays, const UpdateOptions& options = {});
  Instance& instance() { return instance_; }

 private:
  Answer call_step(const ParameterArrays& arrays, const UpdateOptions& options, const Cuts& cuts);
  Instance instance_;
  const zr_optimizer_api& api_;
};

/// The description of an optimizer; fails if the call fails. `api` and `self`: of the instance.
zr_optimizer_desc describe_optimizer(const zr_optimizer_api& api, void* self, const Mode& mode, int64_t count,
                                     uint32_t group, uint32_t flags);
/// Calls step() for slices of the arrays.
Answer step_optimizer(const zr_optimizer_api& api, void* self, const ParameterArrays& arrays,
                      const UpdateOptions& options, const Cuts& cuts);

/// `count` elements cut at random places; with `block`, at multiples of `block` only.
Cuts random_cuts(int64_t count, int64_t block, std::mt19937_64& random);

}  // namespace zr::host::conform
