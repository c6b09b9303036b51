// Steps whose gradients are not reduced over ranks (zr/abi/draft/local_gradients.h): this rank's gradients, the states
// that only such steps have, the optimizer's exchange, and the update.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/draft_abi.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/save.hpp"
#include "engine/norm_blocks.hpp"
#include "job/optimizers.hpp"
#include "job/step_context.hpp"
#include "plan/local_gradients.hpp"
#include "state/local_memory.hpp"
#include "state/sharded_state.hpp"
#include "update/update.hpp"

namespace zr::host::engine {

/// Training thread only, except gradient(), set() and written(), which autograd's thread calls in backward. Without an
/// optimizer that needs local gradients it has no memory, and no step is local.
class LocalGradients {
 public:
  /// Reserves the memory and binds the optimizer to the communicator. Both arguments outlive the object.
  LocalGradients(const job::StepContext& context, state::ShardedState& state);
  LocalGradients(const LocalGradients&) = delete;

  /// Call before the first backward of a step: whether its gradients stay on their ranks. update: the number of the
  /// step's update; the first is 1. The lists, by parameter: number of its updates before the step, and of those whose
  /// gradients were not reduced. The first step whose gradients stay on their ranks allocates the memory, which
  /// is collective. Throws Error if the optimizer rejects the step or memory cannot be allocated on all ranks; the step
  /// then has not begun.
  bool begin_step(int64_t update, const std::vector<int64_t>& all, const std::vector<int64_t>& local);
  /// This rank's sum of a parameter's gradients, fp32. Any thread.
  zr_view gradient(uint32_t param) const { return memory_.gradient(param); }
  struct NonFinite {
    int64_t elements = 0;
    int64_t first_param = -1;  // the first parameter with one, in the model's order; -1: none
  };
  /// The non-finite elements of this rank's gradients, as set() and written() have counted them.
  NonFinite non_finite() const;
  /// Sets a parameter's sum to this fp32 gradient in host memory.
  void set(uint32_t param, const zr_view& gradient);
  /// Call when the sum has been written otherwise.
  void written(uint32_t param);

  /// The arguments of one update, the same on all ranks.
  struct Input {
    float grad_mul;                     // the mean over ranks of gradient x grad_mul is the mean gradient
    int64_t number;                     // of the update; the first is 1
    const std::vector<int64_t>& steps;  // by parameter: number of its updates, including this one
    const std::vector<double>& rates;   // by parameter: learning rate
    const std::vector<char>& touched;   // by parameter: 0 means no update
  };
  /// Exchanges the gradients of touched parameters, and updates this rank's masters, states and weights. Collective.
  void update(const Input& input);
  /// Call after an update whose gradients were reduced: passes the sum of a state to the optimizer, if it needs one.
  /// `norm`: adds up the blocks. Collective.
  void pass_state_sum(int64_t update, NormBlocks& norm);

  /// Call when a parameter's optimizer states have changed otherwise: its private states are
  /// reset before their next use. All ranks call it.
  void restart(uint32_t param);
  /// Call when the optimizer states and masters of all parameters have changed otherwise: their private states are
  /// reset before their next use. All ranks call it.
  void restart();
  /// Call when masters have changed otherwise. All ranks call it.
  void masters_changed() { masters_are_stale_ = true; }

  /// Adds the private states to the contents of a checkpoint. If there are none yet, adds the bytes of later ones.
  void add_to(checkpoint::CheckpointContents& contents) const;
  /// Restores private states that the same number of ranks has saved. names: parameters whose states are loaded, and
  /// their names in the checkpoint. Returns the private states that it does not restore, because the number of ranks
  /// differs, as text; "": none.
  std::string restore(const checkpoint::Checkpoint& from, int64_t saved_world,
                      const std::vector<std::pair<uint32_t, std::string>>& names);

 private:
  struct Array {
    std::string slot;  // name of the state; "": masters
    state::LocalMemory::Elements elements;
    std::size_t index;  // in the plan
    bool all() const { return elements == state::LocalMemory::Elements::all; }
  };
  void bind();
  void warn_if_unused();
  bool needs_local(int64_t update, const zr_param_updates* before) const;
  zr_view state_part(uint32_t param, std::size_t slot, int64_t first, int64_t count) const;
  zr_view view(const Array& array, uint32_t param) const { return memory_.view(array.index, array.elements, param); }
  void prepare_memory(int64_t update);
  void make_slices();
  template <class F>
  void count_non_finite(uint32_t param, const F& in_range);
  void add_replicas();
  void add_replica(uint32_t param, const plan::Piece& weight, int64_t first, int64_t count);
  void round_shared_masters(const std::vector<char>& touched);
  bool is_shared(const Array& array) const { return memory_.is_shared(array.index); }
  bool is_stale(const Array& replica) const { return replica.slot.empty() ? masters_are_stale_ : states_are_stale_; }
  void gather(const Array& array, uint32_t param, state::LogicalTensor kind, const std::string& slot);
  void gather_stale_replicas(uint32_t param);
  void begin_private_states(uint32_t param);
  void prepare(const std::vector<char>& touched);
  void exchange(const Input& input);
  std::vector<int64_t> saved_shape(const Array& array, uint32_t param) const;
  void add_slabs(const Array& array, uint32_t param, checkpoint::CheckpointContents& contents) const;
  void read_saved(const Array& array, uint32_t param, const checkpoint::Checkpoint& from,
                  const checkpoint::SavedTensor& saved);

  const job::StepContext& context_;
  state::ShardedState& state_;
  const plan::LocalPlan plan_;
  const zr_local_gradients_api* api_;  // null: no optimizer needs local gradients
  bool has_memory_ = false;
  state::LocalMemory memory_;
  std::vector<Array> private_, replicas_;
  std::vector<std::vector<zr_served_range>> ranges_;         // by parameter
  std::vector<update::UpdateSlice> slices_;                  // own ones, then those of other ranks' elements
  std::vector<update::UpdateSlice> rounded_;                 // weights, and masters that other ranks of the host update
  std::vector<int64_t> non_finite_;                          // by parameter: elements of its sum
  std::vector<char> begun_;                                  // by parameter: its private states have been used
  bool masters_are_stale_ = true, states_are_stale_ = true;  // of the replicas
};

}  // namespace zr::host::engine
