// This rank's part of the training state: weights, reduced gradients, masters and optimizer states, wherever they
// reside, and every parameter's tensors by name, unsharded.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/trace.hpp"
#include "engine/by_param.hpp"
#include "engine/planned_buffers.hpp"
#include "engine/step_context.hpp"
#include "offload/disk_backed_buffers.hpp"
#include "offload/optimizer_states.hpp"
#include "offload/tier.hpp"
#include "update/update.hpp"

namespace zr::host {

enum class LogicalRole { value, gradient, state };

/// Training thread only, except store_full(). Where a method is collective it says so.
class ShardedState {
 public:
  using Visit = std::function<void(void* memory, int64_t first, int64_t count)>;

  /// Opens the tiers, allocates what is planned, binds the strategy, and takes rank 0's parameters and buffers: then
  /// the model's parameters that are not sharded are this memory. Collective. Refers to all; trace: null if there is
  /// none. When it ends, the model's parameters get memory of their own with the present values.
  ShardedState(const StepContext& context, PluginHost& host, std::vector<std::unique_ptr<Instance>> tiers,
               Trace* trace);
  ShardedState(const ShardedState&) = delete;

  const Tiers& tiers() const { return tiers_; }
  /// Where an index of the plan's places resides; not the device.
  TierStore& tier(int place) { return *tiers_[static_cast<std::size_t>(place)]; }
  const PlannedBuffers& buffers() const { return buffers_; }
  /// See PlannedBuffers.
  DiskBackedBuffers* pages() const { return buffers_.pages(); }
  OptimizerStates& states() { return states_; }
  /// What this rank updates; and those of one parameter, as indices.
  const std::vector<UpdateSlice>& slices() const { return slices_; }
  std::span<const uint32_t> slices_of(uint32_t param) const { return slices_of_[param]; }  // see above
  /// Units whose weights the program can reach in memory of its own: all elements of a parameter, not shared.
  std::vector<const UpdateSlice*> bound_slices() const;
  /// Seconds that training stood still for tiers so far.
  TierWaits waits() const;

  /// Elements [first, first + count) of the tensor on every rank, fp32: gradients as they were reduced. `slot` names an
  /// optimizer state. Collective.
  void read(uint32_t param, LogicalRole role, const std::string& slot, int64_t first, int64_t count, float* out);
  /// Writes this rank's part of an optimizer state from the full tensor.
  void write_state(uint32_t param, const std::string& slot, const float* values);
  /// Writes fp32 values into this rank's master and weight pieces of a parameter.
  void store(uint32_t param, const float* values);
  /// The same of weights alone, from a full parameter in their dtype; remembers those that changed. [use]
  void store_full(uint32_t param, const void* full);
  /// Parameters that store_full() changed since the last call.
  std::set<uint32_t> take_stored();
  bool has_stored() const { return !stored_.empty(); }  // see above

  /// Calls fn(first, count, memory) for what this rank writes of a parameter's weights, part by part.
  void own_weights(uint32_t param, const std::function<void(int64_t first, int64_t count, void* memory)>& fn);
  /// Calls fn over what this rank has of a parameter's tensor of that role ("weight", "master", "state.exp_avg"),
  /// elements [first, first + count).
  void each_memory(uint32_t param, const std::string& role, int64_t first, int64_t count, OptimizerStates::Access use,
                   const Visit& fn);
  /// This rank's memory of those elements; null: they are read from a tier when they are wanted.
  const char* memory_of(uint32_t param, const std::string& role, int64_t first, int64_t count);
  /// The slice's masters become the weights where these are not what they round to. True if there were any.
  bool adopt_master(const UpdateSlice& slice);
  /// Of the slice's weights.
  uint64_t hash_of_weights(const UpdateSlice& slice);
  /// Optimizer states of a parameter become zeros.
  void clear_states(uint32_t param);
  /// Hands all slices with their memory to `work`, by where their states reside: on the device; in a tier's memory
  /// (`staged`); on disk, which are read and written meanwhile.
  void update(const std::vector<char>& touched,
              const std::function<void(const std::vector<UpdateSlice>& slices, bool staged)>& work);

 private:
  // Gives parameters memory of their own when it goes, after what they do not stand in.
  struct ModelRelease {
    Model& model;
    PlannedBuffers& buffers;
    ~ModelRelease();
  };
  void make_slices();
  void bind_strategy();
  // Of OptimizerStates: fp32 masters, or the optimizer's slot of that index.
  std::size_t master_array() const { return 0; }
  std::size_t slot_array(std::size_t slot) const { return slot + (context_.plan.has_master ? 1 : 0); }
  std::optional<std::size_t> array_of(LogicalRole role, const std::string& slot) const;
  // OptimizerStates::visit() over a slice's elements [first, first + count) of its parameter; fn has them likewise.
  void visit(const UpdateSlice& slice, std::size_t array, int64_t first, int64_t count, OptimizerStates::Access use,
             const Visit& fn);
  // Calls fn over the elements of a view of this rank's weights or sums, wherever they stand.
  void reach(const zr_view& view, OptimizerStates::Access use, uint32_t param, const Visit& fn);
  // Elements [first, first + count) of a piece of weights.
  zr_view weights_at(const Piece& piece, int64_t first, int64_t count) const;

  const StepContext& context_;
  const PlanInputView plan_view_;  // what the strategy was bound with
  Tiers tiers_;
  PlannedBuffers buffers_;
  ModelRelease release_;
  OptimizerStates states_;
  std::vector<UpdateSlice> slices_;
  ByParam slices_of_, weights_of_;            // of slices_; of the plan's weight pieces
  std::vector<UpdateSlice> direct_, staged_;  // of slices_: states on the device; in the memory of a tier
  std::set<uint32_t> stored_;
};

}  // namespace zr::host
