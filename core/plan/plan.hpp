// JobConfig + strategy + parameter shapes + world -> MemoryPlan: which rank owns which bytes, and where. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ledger.hpp"
#include "plan/device_staging.hpp"
#include "plan/local_gradients.hpp"
#include "plan/optimizer_description.hpp"
#include "plan/placement.hpp"
#include "zr/abi/optimizer.h"
#include "zr/abi/strategy.h"

namespace zr::host::plan {

/// A parameter of the model, in the model's order. Tied weights are one parameter; `aliases` are its other names.
struct Parameter {
  std::string name;
  std::vector<std::string> aliases;
  std::vector<int64_t> shape;
  int64_t count = 0;  // elements
  bool frozen = false;
  uint32_t group = 0;            // 1 + the index in [[optimizer.groups]]; 0: in no group
  uint32_t optimizer = 0;        // the job's optimizer that updates it: 0 is that of [optimizer]
  uint32_t optimizer_group = 0;  // its group in that optimizer
  bool keeps_fp32 = false;       // its weight is fp32 in a job with 16-bit weights (train.keep_fp32)
};

/// Elements of a norm block (docs/numerics.md, section 7). Parameters are cut only between norm blocks.
inline constexpr int64_t kNormBlock = 1024;
/// Norm blocks of `count` elements of one parameter; the last one may be shorter.
constexpr int64_t norm_blocks_of(int64_t count) { return (count + kNormBlock - 1) / kNormBlock; }
/// Norm blocks of all ranks that one rank holds at a time, to add them in order.
inline constexpr int64_t kNormBlockWindow = 131072;
/// Sums over parameters (draft/partial_sums.h) of all ranks that one rank holds at a time; more if one parameter has
/// more.
inline constexpr int64_t kSumBatch = 131072;
/// Every piece starts at a multiple of this many elements: 64 bytes at two bytes per element.
inline constexpr int64_t kAlign = 32;

struct PlanInput {
  std::vector<Parameter> parameters;
  int world = 1;
  zr_dtype weight_dtype = ZR_F32;  // of parameters that do not keep fp32: see dtype_of()
  int accumulation = 1;
  std::vector<OptimizerDescription> descriptions{1};  // those of the optimizer that differ
  std::vector<uint32_t> description_of;               // by parameter: index in descriptions; empty: all have the first
  std::vector<std::string> optimizer_ids{""};         // by Parameter::optimizer
  std::vector<int> hosts;            // the ranks of each host, numbered host by host; empty: all are on one
  bool share_weights = false;        // the ranks of a host share one copy of unsharded weights
  std::string sharing_obstacle{};    // if not: why, as far as it is known
  bool share_states = false;         // they share masters and states for updates of all weights (LocalArray::shared)
  bool rounds_weights = false;       // gathers of sharded weights need not be exact
  bool accumulates_locally = false;  // gradients.reduce = "last_micro_step": the engine accumulates gradients first
  zr_dtype communicated_grad_dtype =
      ZR_F32;                            // of one backward's gradient, as communicated or held: see gradient_dtype_of()
  zr_dtype fp32_grad_dtype = ZR_F32;     // the same of parameters that keep fp32
  zr_dtype reduced_grad_dtype = ZR_F32;  // of the sum over micro-batches and ranks
  std::vector<TierInfo> tiers{TierInfo{}};
  TierRequest tier_request;
  ExchangePlan exchange_plan{};  // empty: no optimizer needs gradients that are not reduced over ranks
  bool several_hosts() const { return hosts.size() > 1; }
  /// Parameters with weights of one dtype are a part of the job: a strategy plans and serves one part. Part 0 has the
  /// parameters of weight_dtype, part 1 those that keep fp32; without 16-bit weights there is only part 0.
  uint32_t part_of(uint32_t param) const { return weight_dtype != ZR_F32 && parameters[param].keeps_fp32 ? 1 : 0; }
  /// The number of parts: 1 or 2.
  uint32_t parts() const;
  /// The parameters of a part, ascending.
  std::vector<uint32_t> parameters_of(uint32_t part) const;
  zr_dtype part_dtype(uint32_t part) const { return part == 0 ? weight_dtype : zr_dtype{ZR_F32}; }
  zr_dtype part_gradient_dtype(uint32_t part) const { return part == 0 ? communicated_grad_dtype : fp32_grad_dtype; }
  /// The dtype of a parameter's weight.
  zr_dtype dtype_of(uint32_t param) const { return part_dtype(part_of(param)); }
  /// The dtype of a parameter's gradient of one backward, as communicated or held.
  zr_dtype gradient_dtype_of(uint32_t param) const { return part_gradient_dtype(part_of(param)); }
  struct RankLocation {
    int host = 0, index = 0, ranks = 1;  // of a rank: its host, its number on it, and the ranks there
    /// The elements that count for the rank if the ranks of its host share this many: together they count each once.
    int64_t share_of(int64_t elements) const;
  };
  /// Where a rank is. Without `hosts` all are on host 0.
  RankLocation location_of(int rank) const;
  /// What the optimizer declares about a parameter.
  const OptimizerDescription& description(uint32_t param) const {
    return descriptions[description_of.empty() ? 0 : description_of[param]];
  }
  /// The names of the optimizer's states, each once.
  std::vector<std::string> state_names() const;
  /// All parameters may be updated in any parts.
  bool elementwise() const;
  /// The parameter may be cut only at multiples of this many elements.
  int64_t cut_block(uint32_t param) const { return plan::cut_block(parameters[param], description(param)); }
  /// The cost of its update, in units that are the same for all parameters.
  double update_cost(uint32_t param) const {
    const double cost = description(param).cost;
    return cost > 0 ? cost : static_cast<double>(parameters[param].count);
  }
};

struct Buffer {
  uint32_t role;  // ZR_ROLE_*
  std::string tag;
  int64_t elements;
  zr_dtype dtype;
  bool shared = false;  // one memory for all ranks of the host
  /// Bytes that count for a rank: its part of a shared buffer, so that the ranks of a host count the buffer once.
  int64_t bytes(const PlanInput::RankLocation& rank) const;
};

struct Piece {
  uint32_t param, buffer;
  int64_t first, count, offset;  // elements
  bool shard = false;            // weights only: ranks must acquire the parameter to use it
};

/// An array of this rank: the fp32 master weights, or the optimizer states of one name and dtype. Every piece of
/// reduced gradients has a part of it; the part is empty if the parameter has no such state.
struct StateArray {
  std::string name;
  zr_dtype dtype;
  struct ArrayPiece {
    int64_t offset;    // its first element in the array
    StateShape shape;  // width 0: the parameter has no such state
  };
  std::vector<ArrayPiece> parts;  // by reduced-gradient piece
  int64_t elements = 0;
};
/// Elements [first, first + count) of an array.
struct ArrayRange {
  int64_t first, count;
  bool operator==(const ArrayRange&) const = default;
};

/// The buffers and pieces of one rank.
struct RankPlan {
  std::vector<Buffer> buffers;           // those of part 0 first
  std::vector<uint32_t> part_buffers;    // by part: the number of its buffers
  std::vector<Piece> weights;            // by parameter, ascending
  std::vector<Piece> reduced_gradients;  // by parameter, ascending; this rank updates them
  std::vector<int64_t> state_offset;     // per reduced-gradient piece: its first element in the state space
  int64_t state_elements = 0;            // size of the state space: of the master and of each state like its parameter
  std::vector<StateArray> state_arrays;  // masters first, if there are any
};

/// A range of a parameter and the ranks that update it or, for frozen parameters, hold its weights: one rank, or
/// several with equal copies.
struct Segment {
  int64_t first, count;
  std::vector<int> owners;  // ascending
};

/// Bytes communicated per step: received, summed over ranks, without alignment and control traffic
/// (docs/memory-and-communication.md). They follow from which rank holds what, independent of the strategy.
struct StepCommunication {
  /// One kind of collective. times: per step; elements: per time; size: bytes per element; peers: world size - 1.
  struct Term {
    int64_t times = 0, elements = 0, size = 0, peers = 0;
    int64_t bytes() const { return times * elements * size * peers; }
  };
  Term gradients;          // to the ranks that reduce them
  Term reduced_gradients;  // to all ranks, if every rank updates all parameters
  Term weights;            // new weights, to ranks that hold unsharded copies
  Term gathers;            // all-gathers of sharded weights around their uses: see kGatherBound
  int64_t local = 0;       // bytes of a step with local gradients, which has none of the above
  int64_t bytes() const {
    return gradients.bytes() + reduced_gradients.bytes() + weights.bytes() + gathers.bytes();
  }  // an upper bound
};

/// What StepCommunication::gathers is.
inline constexpr std::string_view kGatherBound =
    "an upper bound after the first step, if forward uses each weight once";

/// Facts that text() prints with a plan although no strategy decides them.
struct PlanContext {
  std::optional<int64_t> activations;   // measured bytes per rank; nullopt: unknown
  std::string measured_by;              // the run that measured them
  std::optional<int64_t> communicator;  // bytes of host memory that the communicator allocates when it opens
  std::string communicator_choice;      // a sentence, or ""
  bool snapshot = false;                // checkpoint.async
  int64_t offloaded_activations = 0;    // bytes on tiers, measured by the same run
};

struct MemoryPlan {
  PlanInput input;
  int rank = 0;
  RankPlan rank_plan;                          // of `rank`
  std::vector<std::vector<Segment>> segments;  // per parameter
  bool has_master = false;                     // some weights are narrower than fp32: see has_master_of()
  /// Whether a parameter has an fp32 master in addition to its weight.
  bool has_master_of(uint32_t param) const { return input.dtype_of(param) != ZR_F32; }
  /// Numbers of norm blocks that the ranks exchange.
  struct NormBlockCounts {
    std::vector<int64_t> blocks_per_rank;  // number that each rank contributes
    int64_t total = 0;
    bool replicated = true;         // every rank computes all of them without an exchange
    int64_t bytes(int rank) const;  // memory of a rank for them
  };
  NormBlockCounts norm_blocks;
  /// Numbers of fp64 sums over parameters that this rank holds.
  struct SumCounts {
    int64_t own = 0, totals = 0;  // of its blocks, in the largest pass; of its parameters, in all passes
    int64_t batch = 0;            // of all ranks, that are exchanged at a time; 0: no exchange
    int64_t bytes() const { return 8 * (own + totals + 2 * batch); }
  };
  SumCounts sum_counts() const;
  Placement placement;
  /// The elements of an array for a range of the state space, with the padding between pieces. The range begins and
  /// ends where its parameters may be cut.
  ArrayRange array_range(std::size_t array, int64_t first, int64_t count) const;
  /// The elements of an array for a range of the state space within one piece, without padding.
  ArrayRange array_part(std::size_t array, int64_t first, int64_t count) const;
  /// The index in rank_plan.state_arrays of a state of a parameter; `slot`: index in its description.
  std::size_t array_of(uint32_t param, std::size_t slot) const;
  /// Bytes of all arrays for a range of the state space.
  int64_t state_bytes(int64_t first, int64_t count) const;
  /// The largest number of bytes of all arrays per element of a piece, rounded up.
  int64_t state_bytes_per_element() const;
  int tier_of(const Buffer& buffer) const;  // index in input.tiers
  bool has_offloaded_states() const;        // whether an optimizer state or a master is on a tier
  /// Bytes of staging memory for tiles of states on disk.
  int64_t staging_bytes() const;
  /// Bytes of staging memory for activations on a disk.
  int64_t activation_staging_bytes() const;
  /// Bytes of host memory overhead of a tier for the data it stores, without activations.
  int64_t tier_overhead_bytes(const TierInfo& tier) const;
  std::string update_time;  // when states on tiers are updated, and why; empty: no state is on a tier
  /// Where the training state of a job on a device is, and why: one sentence; empty: job.device is the CPU.
  std::string state_location;
  bool on_device = false;  // weights and gradients of a job on a device are there, not in host memory
  bool in_host_memory() const { return !state_location.empty() && !on_device; }  // all state of a job on a device
  DeviceStaging device_staging{};  // host memory for updates of states on tiers with on_device
  int64_t save_staging = 0;        // bytes of host memory through which state on a device is saved; 0: without it
  /// The tier of each part and the reason, one line each, and update_time; empty if the device is the only tier.
  std::string placement_text() const;
  /// The largest part of the cost of an update on any rank; of this rank, if only it was planned.
  double largest_update_share = 0;
  /// Whether the plans of all ranks were made, so that the largest share is known.
  bool knows_all_shares = false;
  /// This rank's part of the cost of an update, 0 to 1.
  double update_share() const;
  /// The largest number of bytes of device memory on any rank; of this rank, if only it was planned.
  int64_t max_bytes = 0;
  int64_t max_host_bytes = 0;  // bytes on tiers of host memory, all ranks together
  /// Bytes of working memory of this rank: a parameter that rank 0 sends at the start, later the norm blocks.
  int64_t working_bytes() const;
  /// Ranges (first, count) of a parameter that this rank saves; ranks with equal copies share the work.
  std::vector<std::pair<int64_t, int64_t>> saved_ranges(uint32_t param) const;
  /// Bytes of host memory for a copy of the weights, masters and states that this rank saves.
  int64_t snapshot_bytes() const;
  /// Bytes of this rank by kind, in the ledger's order, and in total; without activations.
  std::map<MemoryKind, int64_t> bytes_by_kind(Tier tier = Tier::device) const;
  int64_t bytes(Tier tier = Tier::device) const;
  /// Bytes of this rank's memory for steps with local gradients, a part of bytes(). It is held from the first such
  /// step.
  int64_t local_bytes() const;
  /// The parameters without an unsharded piece on this rank: the strategy gathers them while operators use them.
  std::vector<uint32_t> sharded_parameters() const;
  /// Bytes of the weights that operators use without a gather; the same on all ranks.
  int64_t unsharded_weight_bytes() const;
  /// Bytes of this rank that memory.device_budget limits, without activations: those of the tier `device`; or if all
  /// state of a job on a device is in host memory, those of unsharded weights, which the device has copies of.
  int64_t budgeted_bytes() const;
  int64_t max_budgeted_bytes() const;  // the largest number on any rank
  /// Adds all planned bytes of this rank to `ledger`.
  void add_to(Ledger& ledger) const;
  /// What the parameters of a part communicate per step; local gradients count for part 0.
  StepCommunication communication(uint32_t part = 0) const;
  int64_t communicated_bytes() const;  // per step, of all parts: an upper bound
  /// The table of `zeroth plan`: bytes by kind with their arithmetic.
  std::string text(const std::string& title, const PlanContext& context) const;
};

/// Calls the strategy's plan() for one rank and one part; throws Error if the plug-in fails.
using StrategyPlan = std::function<void(const zr_plan_in& in, const zr_plan_sink& sink)>;

/// Tiles in flight at a time: two are prefetched, one is updated, one is written back.
inline constexpr int64_t kTilesInFlight = 4;

/// Plans `rank` of input.world and, for ownership, every other rank. Throws InternalError with parameter and rule if a
/// piece is cut inside a norm block, misaligned, outside its buffer or overlapping, or if a trainable element has no
/// owner.
MemoryPlan make_plan(const PlanInput& input, int rank, const StrategyPlan& strategy);
/// Plans `rank` alone, for `zeroth plan`: asks the strategy for this rank only, so that the cost does not depend on the
/// world size. Segments stay empty, and rules between ranks are not checked. Throws as make_plan().
MemoryPlan plan_of_rank(const PlanInput& input, int rank, const StrategyPlan& strategy);

/// Assigns tiers to a plan's states, reduced gradients, weight shards and activations.
void assign_tiers(MemoryPlan& plan);

/// A part of a PlanInput, and a rank, as a zr_plan_in; valid while this object and the PlanInput live.
class PlanInputView {
 public:
  PlanInputView(const PlanInput& input, int rank, uint32_t part = 0);
  PlanInputView(const PlanInputView&) = delete;
  const zr_plan_in& in() const { return in_; }

 private:
  std::vector<zr_param> params_;
  std::vector<const zr_param*> pointers_;
  zr_plan_in in_{};
};

}  // namespace zr::host::plan
