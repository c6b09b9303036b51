// This rank's part of the training state on all tiers: weights, reduced gradients, masters and optimizer states; and
// access to unsharded tensors by parameter.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/trace.hpp"
#include "job/step_context.hpp"
#include "offload/device_updates.hpp"
#include "offload/disk_backed_buffers.hpp"
#include "offload/optimizer_states.hpp"
#include "offload/tier.hpp"
#include "state/by_param.hpp"
#include "state/state_buffers.hpp"
#include "update/update.hpp"

namespace zr::host::state {

/// The tensors of a parameter. `value` is the fp32 master if there is one, otherwise the weight.
enum class LogicalTensor { value, gradient, state };

/// Training thread only, except store_full(). A method is collective only if its comment says so.
class ShardedState {
 public:
  /// `first` and `count`: elements of the parameter, in `memory`.
  using Visit = std::function<void(void* memory, int64_t first, int64_t count)>;

  /// Opens the tiers, allocates the planned memory, binds the strategy, and takes over rank 0's parameters and buffers.
  /// From then on the model's unsharded parameters use this memory. The destructor gives the model's parameters their
  /// own memory with the current values. Keeps references to `context`, `host` and `trace` (may be null). Collective.
  ShardedState(const job::StepContext& context, plugin::PluginHost& host,
               const std::vector<std::shared_ptr<const plugin::Instance>>& tiers, Trace* trace);
  ShardedState(const ShardedState&) = delete;

  const offload::Tiers& tiers() const { return tiers_; }
  /// The store of a tier; `index`: in the plan's tiers, not 0 (the device).
  offload::TierStore& tier(int index) { return *tiers_[static_cast<std::size_t>(index)]; }
  /// Throws EnvironmentError if a transfer to or from a tier has failed.
  void check_tiers() const;
  const StateBuffers& buffers() const { return buffers_; }
  /// The buffers on disk; null: all are in memory.
  offload::DiskBackedBuffers* disk_buffers() const { return buffers_.disk_buffers(); }
  offload::OptimizerStates& states() { return states_; }
  /// Updates states on tiers if gradients are on a device; null: all others.
  offload::DeviceUpdates* device_updates() { return device_updates_ ? &*device_updates_ : nullptr; }
  const offload::DeviceUpdates* device_updates() const { return device_updates_ ? &*device_updates_ : nullptr; }
  /// The slices that this rank updates.
  const std::vector<update::UpdateSlice>& slices() const { return slices_; }
  /// Indices in slices() of a parameter's slices.
  std::span<const uint32_t> slices_of(uint32_t param) const { return slices_of_[param]; }
  /// Slices of parameters whose weights are unsharded in memory that ranks do not share, so the program can write to
  /// them through pointers.
  std::vector<const update::UpdateSlice*> bound_slices() const;
  /// Seconds that training has waited for tiers so far.
  offload::TierWaits waits() const;

  /// Writes elements [first, first + count) of a tensor to `out` on every rank, as fp32. Gradients are not scaled.
  /// `slot` names an optimizer state. Collective.
  void read(uint32_t param, LogicalTensor kind, const std::string& slot, int64_t first, int64_t count, float* out);
  /// Writes this rank's part of an optimizer state from the full tensor.
  void write_state(uint32_t param, const std::string& slot, const float* values);
  /// Writes fp32 values into this rank's master and weight pieces of a parameter.
  void store(uint32_t param, const float* values);
  /// Writes this rank's weight pieces of a parameter from the full parameter in the dtype of the weights, which is
  /// where the weights are: in host memory or on the device. If any element changes, adds the parameter to
  /// take_stored(). [use]
  void store_full(uint32_t param, const void* full);
  /// Returns the parameters that store_full() has changed since the last call.
  std::set<uint32_t> take_stored();
  const std::set<uint32_t>& stored() const { return stored_; }  // what take_stored() would return

  /// Calls fn(first, count, memory) for each part of a parameter's weights that this rank is responsible for writing.
  void own_weights(uint32_t param, offload::OptimizerStates::Access access,
                   const std::function<void(int64_t first, int64_t count, void* memory)>& fn);
  /// Calls fn over a tensor for elements [first, first + count) of its parameter, all of which this rank must store.
  /// kind: "weight", "master", or an optimizer state such as "state.exp_avg", of which `memory` then has the elements
  /// for these elements of the parameter (plan::StateShape).
  void visit_tensor(uint32_t param, const std::string& kind, int64_t first, int64_t count,
                    offload::OptimizerStates::Access access, const Visit& fn);
  /// The address of the same elements if they are contiguous in memory; null: use visit_tensor().
  const char* contiguous_address(uint32_t param, const std::string& kind, int64_t first, int64_t count);
  /// The address of the same elements if they are contiguous in memory of the device; null: use visit_tensor().
  const char* contiguous_on_device(uint32_t param, const std::string& kind, int64_t first, int64_t count) const;
  /// Sets each master of the slice to its weight if the weight differs from the rounded master. Returns true if any
  /// differed.
  bool sync_master_from_weights(const update::UpdateSlice& slice);
  /// The hash of the slice's weights.
  uint64_t hash_of_weights(const update::UpdateSlice& slice);
  /// Sets this rank's optimizer states of a parameter to zero.
  void clear_states(uint32_t param);
  /// Multiplies this rank's reduced gradients of touched parameters by `factor`, calls fn over parts of them as fp32,
  /// and stores what fn leaves in `values` in their place. Does not call fn for a part with an infinite or NaN element.
  void edit_gradients(float factor, const std::vector<char>& touched,
                      const std::function<void(uint32_t param, int64_t first, int64_t count, float* values)>& fn);
  /// The slices with states on a tier in memory.
  const std::vector<update::UpdateSlice>& staged() const { return staged_; }
  /// What a step has already updated; empty lists: nothing.
  struct Updated {
    std::vector<char> tiles;   // by tile of the plan: not 0 if it is updated
    std::vector<char> staged;  // by slice of staged()
  };
  /// Passes all slices that are not in `updated` to `work`, with their states in memory: first those with states on the
  /// device, then on a tier in memory, then on disk; those on disk are read and written meanwhile.
  void for_each_slice_in_memory(const std::vector<char>& touched, const Updated& updated,
                                const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work);

 private:
  // Its destructor frees the buffers that do not contain weights, then gives the model's parameters their own memory.
  struct ModelRelease {
    model::Model& model;
    StateBuffers& buffers;
    ~ModelRelease();
  };
  const plan::Piece& weights_for(const plan::Piece& reduced) const;
  update::UpdateSlice make_slice(const plan::Piece& reduced, const plan::Piece& weight, int64_t skip,
                                 const plan::StateRange& range) const;
  void make_slices();
  void shared_weights(uint32_t param, const std::function<void(int64_t first, int64_t count)>& fn) const;
  void bind_strategy();
  // The index of the fp32 masters in RankPlan::state_arrays.
  std::size_t master_array() const { return 0; }
  // The array that contains a kind of tensor of a parameter; nullopt: it is in a buffer of the plan.
  std::optional<std::size_t> array_of(uint32_t param, LogicalTensor kind, const std::string& slot) const;
  // The array that contains a kind of tensor of visit_tensor(), other than "weight", of a parameter.
  std::size_t array_of_kind(uint32_t param, const std::string& kind) const;
  // OptimizerStates::visit() over elements [first, first + count) of the slice's parameter, which fn receives too.
  void visit_state(const update::UpdateSlice& slice, std::size_t array, int64_t first, int64_t count,
                   offload::OptimizerStates::Access access, const Visit& fn);
  // Calls fn over the elements of a view of this rank's weights or reduced gradients, in memory or on disk.
  void visit_view(const zr_view& view, offload::OptimizerStates::Access access, uint32_t param, const Visit& fn);
  // Elements [first, first + count) of a piece of weights, numbered as in the parameter.
  zr_view weights_at(const plan::Piece& piece, int64_t first, int64_t count) const;

  const job::StepContext& context_;
  offload::Tiers tiers_;
  StateBuffers buffers_;
  ModelRelease release_;
  offload::OptimizerStates states_;
  std::optional<offload::DeviceUpdates> device_updates_;
  std::vector<update::UpdateSlice> slices_;
  ByParam slices_of_, weights_of_;                    // indices in slices_; in the plan's weight pieces
  std::vector<update::UpdateSlice> direct_, staged_;  // slices with states on the device; on a tier in memory
  std::set<uint32_t> stored_;
};

}  // namespace zr::host::state
