// JobConfig + strategy + parameter shapes + world -> MemoryPlan: who owns which bytes, where. Pure and printable.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "plan/placement.hpp"
#include "zr/abi/optimizer.h"
#include "zr/abi/strategy.h"

namespace zr::host {

/// A parameter of the model, in the model's order. Tied weights are one parameter; its other names are aliases.
struct Parameter {
  std::string name;
  std::vector<std::string> aliases;
  std::vector<int64_t> shape;
  int64_t count = 0;  // elements
  bool frozen = false;
  uint32_t group = 0;
};

/// Elements a parameter is never cut inside: the leaf of the norm (NUMERICS.md 7).
inline constexpr int64_t kNormBlock = 1024;
/// Leaves of `count` elements of one parameter; the last may be short.
constexpr int64_t norm_blocks_of(int64_t count) { return (count + kNormBlock - 1) / kNormBlock; }
/// Leaves of all ranks that one rank holds at a time, to fold them in order.
inline constexpr int64_t kNormBlockWindow = 131072;
/// Elements every piece starts at a multiple of: 64 bytes at two bytes an element.
inline constexpr int64_t kAlign = 32;

struct PlanInput {
  std::vector<Parameter> parameters;
  int world = 1;
  zr_dtype weight_dtype = ZR_F32;
  int accumulation = 1;
  std::vector<zr_slot> slots;  // of the optimizer
  bool alias = false;          // ranks of one host can have one memory
  bool hold_gradients =
      false;  // gradients.reduce = "last_micro_step": gradients are added up in their tiers before they leave
  zr_dtype grad_dtype = ZR_F32;          // of one backward's gradient, as it travels, or of what is held
  zr_dtype reduced_grad_dtype = ZR_F32;  // of the sum over micro-batches and ranks
  std::vector<TierInfo> tiers{TierInfo{}};
  TierRequest wanted;
};

struct Buffer {
  uint32_t role;  // ZR_ROLE_*
  std::string tag;
  int64_t elements;
  zr_dtype dtype;
  bool alias = false;  // one memory for all ranks
  /// Bytes that count for a rank: of an aliased buffer its share, so that a host's ranks count it once.
  int64_t bytes(int rank, int world) const;
};

struct Piece {
  uint32_t param, buffer;
  int64_t first, count, offset;  // elements
  bool shard = false;            // of weights: no rank is to use the parameter without acquiring it
};

/// What one rank holds.
struct RankPlan {
  std::vector<Buffer> buffers;
  std::vector<Piece> weights;            // by parameter, ascending
  std::vector<Piece> reduced_gradients;  // likewise: what this rank updates
  std::vector<int64_t> state_offset;     // of each sum piece in the master and in every slot, elements
  int64_t state_elements = 0;            // of the master, and of a slot like the parameter
};

/// A run of a parameter and the ranks that update it (or, for frozen parameters, hold its weights): one or all alike.
struct Segment {
  int64_t first, count;
  std::vector<int> owners;  // ascending
};

/// Bytes a step moves: received, summed over ranks, alignment and control traffic apart (DESIGN.md 5). It follows from
/// who holds what, whatever the strategy.
struct Traffic {
  struct Part {
    int64_t times = 0, elements = 0, size = 0, peers = 0;  // peers: the other ranks
    int64_t bytes() const { return times * elements * size * peers; }
  };
  Part gradients;          // to where they are summed
  Part reduced_gradients;  // to the other ranks, where every rank updates everything
  Part weights;            // new ones, to ranks that keep them whole
  Part gathers;            // weights around their uses, at most
  int64_t bytes() const {
    return gradients.bytes() + reduced_gradients.bytes() + weights.bytes() + gathers.bytes();
  }  // at most
};

/// What a plan is shown with, though no strategy decides it.
struct PlanContext {
  std::optional<int64_t> activations;   // measured, of a rank: bytes; else not known
  std::string measured_by;              // the run that did
  std::optional<int64_t> communicator;  // host memory that it takes when it opens
  bool snapshot = false;                // checkpoint.async
  int64_t offloaded_activations = 0;    // activations on tiers, measured by that run too
};

struct MemoryPlan {
  PlanInput input;
  int rank = 0;
  RankPlan mine;
  std::vector<std::vector<Segment>> segments;  // by parameter
  bool has_master = false;                     // weights are narrower than fp32
  /// Elements of the leaves of the norm that the ranks hand to one another: what each rank provides, in all, and
  /// whether every rank has all of them without an exchange.
  struct NormBlocks {
    std::vector<int64_t> provided;  // by rank
    int64_t total = 0;
    bool everywhere = true;
    int64_t bytes(int rank) const;  // that a rank holds for them
  };
  NormBlocks norm_blocks;
  Placement placement;
  /// Master weights, if there are any, then the optimizer's slots: arrays over the state space.
  struct StateArray {
    std::string name;
    zr_dtype dtype;
  };
  std::vector<StateArray> state_arrays() const;
  int tier_of(const Buffer& buffer) const;  // of input.tiers
  /// Host memory that tiles of states on disk go through.
  int64_t staging_bytes() const;
  /// And that activations on their way to a disk and back do.
  int64_t activation_staging_bytes() const;
  /// Host memory that a tier takes of its own for what stands there, activations apart.
  int64_t tier_overhead_bytes(const TierInfo& tier) const;
  /// What stands where, and why, a line each; empty if there is the device alone.
  std::string placement_text() const;
  /// Of device memory, the most that any rank holds; this rank's, if it alone was planned.
  int64_t max_bytes = 0;
  int64_t max_host_bytes = 0;  // on tiers of host memory, all ranks together
  /// What this rank holds besides what grows with the model: rank 0's parameters on their way at the start, then the
  /// leaves of the norm.
  int64_t working_bytes() const;
  /// Runs of a parameter that this rank saves: its share where several ranks hold the same.
  std::vector<std::pair<int64_t, int64_t>> saved_runs(uint32_t param) const;
  /// Host memory for a copy of what this rank saves of weights, masters and states.
  int64_t snapshot_bytes() const;
  /// Memory of this rank by kind, in the ledger's order, and in all: without activations.
  std::map<MemoryKind, int64_t> bytes_by_kind(Tier tier = Tier::device) const;
  int64_t bytes(Tier tier = Tier::device) const;
  /// Notes every byte this rank will hold.
  void add_to(Ledger& ledger) const;
  Traffic traffic() const;
  /// Bytes by kind with the arithmetic, for people.
  std::string text(const std::string& title, const PlanContext& context) const;
};

/// The strategy's plan() of one rank; throws Failure if the plug-in fails.
using StrategyPlan = std::function<void(const zr_plan_in& in, const zr_plan_sink& sink)>;

/// Tiles that are under way at a time: two are read ahead, one is worked on, one is written behind.
inline constexpr int64_t kTilesInFlight = 4;

/// Plans `rank` of input.world and, for ownership, every other rank. Throws Failure(bug) naming parameter and rule if a
/// piece is cut inside a leaf, misaligned, out of its buffer, overlapping, or if a trainable element has no owner.
MemoryPlan make_plan(const PlanInput& input, int rank, const StrategyPlan& strategy);
/// The same for people: asks the strategy for this rank alone, so that a world of any size costs no more than one rank.
/// Segments stay empty, and rules that hold between ranks are not checked.
MemoryPlan plan_of_rank(const PlanInput& input, int rank, const StrategyPlan& strategy);

/// Decides where a plan's states, sums and shards stand. Throws Failure(user) where what was asked for cannot be.
void assign_tiers(MemoryPlan& plan);

/// PlanInput and rank in the ABI's words; valid while both live.
class PlanInputView {
 public:
  PlanInputView(const PlanInput& input, int rank);
  const zr_plan_in& in() const { return in_; }

 private:
  std::vector<zr_param> params_;
  std::vector<const zr_param*> pointers_;
  zr_plan_in in_{};
};

}  // namespace zr::host
