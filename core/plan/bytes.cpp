// Bytes by kind and communication of a plan, and both as text.
#include <fmt/format.h>

#include <algorithm>

#include "base/dtype.hpp"
#include "base/text.hpp"
#include "plan/disk_staging.hpp"
#include "plan/plan.hpp"

namespace zr::host::plan {

namespace {
MemoryKind kind_of_role(uint32_t role) {
  switch (role) {
    case ZR_ROLE_WEIGHT:
    case ZR_ROLE_WEIGHT_SHARD: return MemoryKind::weights;
    case ZR_ROLE_GRAD:
    case ZR_ROLE_REDUCED_GRAD: return MemoryKind::gradients;
    case ZR_ROLE_BUCKET: return MemoryKind::buckets;
    default: return MemoryKind::all_gather;
  }
}

// The functions below call fn(tier, kind, tag, elements, dtype) for a part of the memory of a rank.

template <class F>
void for_each_buffer(const MemoryPlan& plan, F&& fn) {
  for (const Buffer& b : plan.rank_plan.buffers) {
    const int64_t elements = b.bytes(plan.input.location_of(plan.rank)) / size_of(b.dtype);
    fn(plan.input.tiers[static_cast<std::size_t>(plan.tier_of(b))], kind_of_role(b.role), b.tag, elements, b.dtype);
  }
}

int64_t state_elements_on(const MemoryPlan& plan, std::size_t array, std::size_t tier) {
  int64_t elements = 0;
  for (const StateRange& range : plan.placement.states)
    if (range.tier == static_cast<int>(tier)) elements += plan.array_range(array, range.first, range.count).count;
  return elements;
}

// The master weights and optimizer states; those of the device also if they are empty.
template <class F>
void for_each_state(const MemoryPlan& plan, F&& fn) {
  const std::vector<StateArray>& arrays = plan.rank_plan.state_arrays;
  for (std::size_t a = 0; a < arrays.size(); ++a) {
    const MemoryKind kind = plan.has_master && a == 0 ? MemoryKind::master : MemoryKind::optimizer;
    for (std::size_t tier = 0; tier < plan.input.tiers.size(); ++tier)
      if (const int64_t elements = state_elements_on(plan, a, tier); elements > 0 || tier == 0)
        fn(plan.input.tiers[tier], kind, arrays[a].name, elements, arrays[a].dtype);
  }
}

// Host memory in which data of the tiers is staged, and which the tiers need for themselves.
template <class F>
void for_each_staging_buffer(const MemoryPlan& plan, F&& fn) {
  static const auto& staging = *new TierInfo{"host memory", Tier::host};  // never destroyed
  if (plan.staging_bytes() > 0) fn(staging, MemoryKind::staging, "states in flight", plan.staging_bytes(), ZR_U8);
  if (const int64_t bytes = plan.activation_staging_bytes())
    fn(staging, MemoryKind::staging, "activations in flight", bytes, ZR_U8);
  for (const TierInfo& tier : plan.input.tiers)
    if (const int64_t bytes = plan.tier_overhead_bytes(tier))
      fn(staging, MemoryKind::other, "overhead of " + tier.id, bytes, ZR_U8);
  if (const DiskStaging disk_staging = plan_disk_staging(plan); disk_staging.any)
    fn(staging, MemoryKind::staging, "disk-backed buffers", disk_staging.bytes(), ZR_U8);
}

template <class F>
void for_each_local_array(const MemoryPlan& plan, F&& fn) {
  for (const LocalArray& array : local_plan(plan).arrays)
    fn(plan.input.tiers[0], array.kind, array.tag, array.counted, array.dtype);
}

// All memory of a rank.
template <class F>
void for_each_allocation(const MemoryPlan& plan, F&& fn) {
  for_each_buffer(plan, fn);
  for_each_state(plan, fn);
  fn(plan.input.tiers[0], MemoryKind::other, "start of training, norm blocks", plan.working_bytes(), ZR_U8);
  for_each_staging_buffer(plan, fn);
  for_each_local_array(plan, fn);
}

}  // namespace

int64_t MemoryPlan::NormBlockCounts::bytes(int rank) const {
  const int64_t window = std::min(total, kNormBlockWindow);
  const int64_t own = std::max<int64_t>(replicated ? total : blocks_per_rank[static_cast<std::size_t>(rank)], 1);
  return 8 * (replicated ? own : own + std::max<int64_t>(window, 1) + window);
}

int64_t MemoryPlan::working_bytes() const {
  int64_t largest = 0;
  for (const Parameter& p : input.parameters) largest = std::max(largest, p.count);
  return std::max(largest * 4, norm_blocks.bytes(rank) + sum_counts().bytes());
}

double MemoryPlan::update_share() const {
  double own = 0, all = 0;
  for (uint32_t i = 0; i < input.parameters.size(); ++i)
    if (!input.parameters[i].frozen) all += input.update_cost(i);
  for (const Piece& piece : rank_plan.reduced_gradients)
    own += input.update_cost(piece.param) * static_cast<double>(piece.count) /
           static_cast<double>(input.parameters[piece.param].count);
  return all > 0 ? own / all : 0;
}

MemoryPlan::SumCounts MemoryPlan::sum_counts() const {
  SumCounts counts;
  if (std::all_of(input.descriptions.begin(), input.descriptions.end(),
                  [](const OptimizerDescription& description) { return description.sums.empty(); }))
    return counts;
  const auto blocks = [&](uint32_t param, int64_t count) {
    const int64_t block = input.cut_block(param);
    return (count + block - 1) / block * input.description(param).most_sums();
  };
  int64_t last = -1;  // parameter
  for (const Piece& piece : rank_plan.reduced_gradients) {
    counts.own += blocks(piece.param, piece.count);
    if (piece.param != last) counts.totals += input.description(piece.param).all_sums();
    last = piece.param;
  }
  if (norm_blocks.replicated) return counts;
  int64_t all = 0;
  for (uint32_t i = 0; i < input.parameters.size(); ++i) {
    if (input.parameters[i].frozen) continue;
    const int64_t values = blocks(i, input.parameters[i].count);
    all += values;
    counts.batch = std::max(counts.batch, values);
  }
  counts.batch = std::max(counts.batch, std::min(all, kSumBatch));
  return counts;
}

std::vector<std::pair<int64_t, int64_t>> MemoryPlan::saved_ranges(uint32_t param) const {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const Segment& segment : segments[param]) {
    const auto me = std::find(segment.owners.begin(), segment.owners.end(), rank);
    if (me == segment.owners.end()) continue;
    const int64_t block = input.parameters[param].frozen ? kNormBlock : input.cut_block(param);
    const int64_t index = me - segment.owners.begin(), n = std::ssize(segment.owners),
                  blocks = (segment.count + block - 1) / block;
    const auto cut = [&](int64_t i) { return std::min(segment.count, blocks * i / n * block); };
    if (cut(index + 1) > cut(index)) ranges.emplace_back(segment.first + cut(index), cut(index + 1) - cut(index));
  }
  return ranges;
}

int64_t MemoryPlan::snapshot_bytes() const {
  int64_t bytes = 0;
  for (uint32_t i = 0; i < input.parameters.size(); ++i) {
    const Parameter& p = input.parameters[i];
    const auto add = [&](int64_t first, int64_t count) {
      bytes += count * (size_of(input.dtype_of(i)) + (has_master_of(i) && !p.frozen ? 4 : 0));
      if (p.frozen) return;
      for (const zr_slot& slot : input.description(i).slots) {
        const StateShape shape = state_shape(p, slot);
        bytes += (shape.of(first + count) - shape.of(first)) * size_of(slot.dtype);
      }
    };
    if (segments.empty()) {
      add(0, (p.count + input.world - 1) / input.world);  // plan_of_rank(): an approximation
    } else {
      for (const auto& [first, count] : saved_ranges(i)) add(first, count);
    }
  }
  const LocalPlan local = local_plan(*this);
  for (std::size_t i = 1; i <= local.private_arrays; ++i) bytes += local.arrays[i].elements * int64_t{sizeof(float)};
  return bytes;
}

std::map<MemoryKind, int64_t> MemoryPlan::bytes_by_kind(Tier tier) const {
  std::map<MemoryKind, int64_t> bytes;
  for_each_allocation(
      *this, [&](const TierInfo& where, MemoryKind kind, const std::string&, int64_t elements, zr_dtype dtype) {
        if (where.tier == tier) bytes[kind] += elements * size_of(dtype);
      });
  return bytes;
}

int64_t MemoryPlan::bytes(Tier tier) const {
  int64_t bytes = 0;
  for (const auto& [kind, of_kind] : bytes_by_kind(tier)) bytes += of_kind;
  return bytes;
}

int64_t MemoryPlan::local_bytes() const {
  int64_t bytes = 0;
  for (const LocalArray& array : local_plan(*this).arrays) bytes += array.bytes();
  return bytes;
}

std::vector<uint32_t> MemoryPlan::sharded_parameters() const {
  const std::vector<Parameter>& parameters = input.parameters;
  std::vector<char> unsharded(parameters.size(), 0);
  for (const Piece& piece : rank_plan.weights)
    unsharded[piece.param] |= !piece.shard && piece.count == parameters[piece.param].count;
  std::vector<uint32_t> sharded;
  for (uint32_t i = 0; i < unsharded.size(); ++i)
    if (!unsharded[i] && parameters[i].count > 0) sharded.push_back(i);
  return sharded;
}

int64_t MemoryPlan::unsharded_weight_bytes() const {
  int64_t bytes = 0;
  for (const Piece& piece : rank_plan.weights)
    bytes += piece.shard ? 0 : piece.count * size_of(input.dtype_of(piece.param));
  return bytes;
}

int64_t MemoryPlan::budgeted_bytes() const { return in_host_memory() ? unsharded_weight_bytes() : bytes(); }

int64_t MemoryPlan::max_budgeted_bytes() const { return in_host_memory() ? unsharded_weight_bytes() : max_bytes; }

void MemoryPlan::add_to(Ledger& ledger) const {
  for (const Tier tier : {Tier::device, Tier::host, Tier::disk})
    for (const auto& [kind, bytes] : bytes_by_kind(tier)) ledger.plan(tier, kind, bytes);
}

int64_t MemoryPlan::communicated_bytes() const {
  int64_t bytes = 0;
  for (uint32_t part = 0; part < input.parts(); ++part) bytes += communication(part).bytes();
  return bytes;
}

StepCommunication MemoryPlan::communication(uint32_t part) const {
  int64_t parameters = 0, trainable = 0, unsharded = 0, unsharded_trainable = 0, reduced = 0;
  for (const uint32_t param : input.parameters_of(part)) {
    const Parameter& p = input.parameters[param];
    parameters += p.count;
    trainable += p.frozen ? 0 : p.count;
  }
  for (const Piece& piece : rank_plan.reduced_gradients)
    reduced += input.part_of(piece.param) == part ? piece.count : 0;
  for (const Piece& piece : rank_plan.weights) {
    const Parameter& p = input.parameters[piece.param];
    if (piece.count != p.count || input.part_of(piece.param) != part) continue;
    unsharded += p.count;
    unsharded_trainable += p.frozen ? 0 : p.count;
  }
  const int64_t peers = input.world - 1, micro_steps = input.accumulation;
  const int64_t w = size_of(input.part_dtype(part)), r = size_of(input.part_gradient_dtype(part)),
                g = size_of(input.reduced_grad_dtype);
  const bool replicated = reduced == trainable;
  StepCommunication communication;
  communication.gradients = {input.accumulates_locally ? 1 : micro_steps, trainable, r, peers};
  if (replicated) {
    communication.reduced_gradients = {1, trainable, g, peers};
  } else if (!input.share_weights || input.several_hosts()) {
    const bool shared = std::ranges::any_of(rank_plan.buffers, [](const Buffer& b) { return b.shared; });
    communication.weights = {1, unsharded_trainable, w, shared ? std::ssize(input.hosts) - 1 : peers};
  }
  communication.gathers = {2 * micro_steps, parameters - unsharded, w, peers};
  communication.local = part == 0 ? local_plan(*this).exchange.received : 0;
  return communication;
}

namespace {
std::string row(const std::string& kind, const std::string& tag, const std::string& arithmetic,
                const std::string& value) {
  return fmt::format("  {:<13}  {:<29} {:>28} {:>12}\n", kind, tag, arithmetic, value);
}
std::string row(const std::string& kind, const std::string& tag, const std::string& arithmetic, int64_t bytes) {
  return row(kind, tag, arithmetic, bytes_text(bytes));
}

// All memory of a rank, and its total per tier.
std::string memory_rows(const MemoryPlan& plan) {
  std::string rows;
  std::map<std::string, int64_t> elsewhere;  // bytes per tier other than the device
  for_each_allocation(
      plan, [&](const TierInfo& where, MemoryKind kind, const std::string& tag, int64_t elements, zr_dtype dtype) {
        const std::string arithmetic = dtype == ZR_U8 ? "" : fmt::format("{} x {}", elements, size_of(dtype));
        const bool here = where.tier == Tier::device;
        if (here && elements == 0 && plan.input.tiers.size() > 1) return;
        rows += row(std::string(kMemoryKindNames[static_cast<std::size_t>(kind)]),
                    tag + (here ? "" : " on " + where.id), arithmetic, elements * size_of(dtype));
        if (!here) elsewhere[where.id] += elements * size_of(dtype);
      });
  rows += row("total", "without activations", "", plan.bytes());
  if (plan.input.exchange_plan) rows += row("total", "before local gradients", "", plan.bytes() - plan.local_bytes());
  for (const auto& [id, bytes] : elsewhere) rows += row("total", "on " + id, "", bytes);
  return rows;
}

std::string communication_rows(const StepCommunication& step, const std::string& suffix) {
  std::string rows;
  const auto add_row = [&](const std::string& what, const StepCommunication::Term& part) {
    if (part.bytes() > 0)
      rows += row("communication", what + suffix,
                  fmt::format("{} x {} x {} x {}", part.times, part.elements, part.size, part.peers), part.bytes());
  };
  add_row("gradients per step", step.gradients);
  add_row("reduced gradients per step", step.reduced_gradients);
  add_row("new weights per step", step.weights);
  add_row("all-gathers per step", step.gathers);
  if (step.local > 0) rows += row("communication", "step with local gradients", "", step.local);
  return rows;
}
}  // namespace

std::string MemoryPlan::text(const std::string& title, const PlanContext& context) const {
  int64_t trainable = 0, frozen = 0;
  for (const Parameter& p : input.parameters) (p.frozen ? frozen : trainable) += p.count;
  std::string out = fmt::format("{}: {} parameters{}, {}, {} rank{}, bytes of rank {}\n", title, trainable,
                                frozen ? fmt::format(" and {} frozen", frozen) : "",
                                fmt::format("{}{}", name_of(input.weight_dtype), input.parts() > 1 ? " and fp32" : ""),
                                input.world, input.world == 1 ? "" : "s", rank);
  out += memory_rows(*this);
  if (!state_location.empty()) out += fmt::format("  {}\n", state_location);
  if (!context.communicator_choice.empty()) out += fmt::format("  {}\n", context.communicator_choice);
  out += placement_text();
  out += context.activations ? row("activations", "measured: " + context.measured_by, "", *context.activations)
                             : "  activations    unknown until measured by a run\n";
  if (context.communicator) out += row("host memory", "communicator", "", *context.communicator);
  if (const int64_t bytes = device_staging.bytes()) out += row("host memory", "gradients and new weights", "", bytes);
  if (save_staging > 0) out += row("host memory", "a part of a checkpoint", "", save_staging);
  if (context.snapshot) out += row("host memory", "copy for checkpoint.async", "", snapshot_bytes());
  const auto costs = [](const OptimizerDescription& d) { return d.cost > 0 || d.granularity != ZR_ELEMENTWISE; };
  if (input.world > 1 && std::any_of(input.descriptions.begin(), input.descriptions.end(), costs))
    out +=
        row("update", knows_all_shares ? "largest share of a rank" : fmt::format("share of rank {}", rank),
            fmt::format("{:.0f} % if even", 100.0 / input.world), fmt::format("{:.0f} %", 100 * largest_update_share));
  bool gathers = false;
  for (uint32_t part = 0; part < input.parts(); ++part) {
    const StepCommunication step = communication(part);
    out += communication_rows(step, part == 0 ? "" : ", fp32");
    gathers |= step.gathers.bytes() > 0;
  }
  if (gathers) out += fmt::format("  all-gathers: {}\n", kGatherBound);
  return out;
}

}  // namespace zr::host::plan
