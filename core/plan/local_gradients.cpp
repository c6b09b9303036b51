#include "plan/local_gradients.hpp"

#include <algorithm>

#include "base/draft_abi.hpp"  // IWYU pragma: keep
#include "base/round_up.hpp"
#include "plan/plan.hpp"

namespace zr::host::plan {

namespace {

// Ranks with all reduced gradients serve equal runs of norm blocks, in the model's order.
void cut_equally(const PlanInput& input, LocalPlan& local) {
  int64_t total = 0, block = 0;
  for (const Parameter& p : input.parameters) total += p.frozen ? 0 : norm_blocks_of(p.count);
  int rank = 0;
  const auto end_of = [&](int64_t r) { return total * (r + 1) / input.world; };
  for (std::size_t i = 0; i < input.parameters.size(); ++i) {
    const Parameter& p = input.parameters[i];
    for (int64_t first = 0; !p.frozen && first < p.count;) {
      while (end_of(rank) <= block) ++rank;
      const int64_t blocks = std::min(end_of(rank) - block, norm_blocks_of(p.count - first));
      const int64_t count = std::min(blocks * kNormBlock, p.count - first);
      local.ranges[i].push_back({first, count, rank});
      first += count;
      block += blocks;
    }
  }
}

// Ranks with parts of the reduced gradients serve these; without the other ranks' plans, only this rank's are known.
void cut_by_owner(const MemoryPlan& plan, LocalPlan& local) {
  if (plan.segments.empty()) {
    for (const Piece& piece : plan.rank_plan.reduced_gradients)
      local.ranges[piece.param].push_back({piece.first, piece.count, plan.rank});
    return;
  }
  for (std::size_t i = 0; i < plan.segments.size(); ++i)
    if (!plan.input.parameters[i].frozen)
      for (const Segment& segment : plan.segments[i])
        local.ranges[i].push_back({segment.first, segment.count, segment.owners.front()});
}

// Whether this rank has own memory for all weights, of which it owns a part.
bool has_replicas(const MemoryPlan& plan) {
  return std::ranges::any_of(plan.rank_plan.weights, [&](const Piece& piece) {
    return !plan.input.parameters[piece.param].frozen && !plan.rank_plan.buffers[piece.buffer].shared;
  });
}

// Whether every rank has all reduced gradients. Decided from the plans of all ranks where they are known: one rank may
// own all elements of a small model.
bool every_rank_owns_all(const MemoryPlan& plan, int64_t owned, int64_t trainable) {
  if (plan.segments.empty()) return owned == trainable;
  for (std::size_t i = 0; i < plan.segments.size(); ++i)
    for (const Segment& segment : plan.segments[i])
      if (!plan.input.parameters[i].frozen && std::ssize(segment.owners) != plan.input.world) return false;
  return true;
}

void add_arrays(const MemoryPlan& plan, LocalPlan& local) {
  const PlanInput::RankLocation location = plan.input.location_of(plan.rank);
  const auto add = [&](MemoryKind kind, const std::string& tag, int64_t elements, zr_dtype dtype = ZR_F32,
                       bool is_shared = false) {
    if (std::ranges::none_of(local.arrays, [&](const LocalArray& array) { return array.tag == tag; }))
      local.arrays.push_back(
          {kind, tag, elements, dtype, is_shared, is_shared ? location.share_of(elements) : elements});
  };
  add(MemoryKind::gradients, "local gradients", local.elements);
  for (const OptimizerDescription& description : plan.input.descriptions)
    for (const zr_slot& slot : description.private_slots)
      add(MemoryKind::optimizer, std::string(slot.name) + ", own",
          slot.flags & ZR_SLOT_UNSHARDED ? local.elements : local.served);
  local.private_arrays = local.arrays.size() - 1;
  const bool shared = plan.input.share_states;
  if (local.has_replicas && plan.has_master)
    add(MemoryKind::master, "fp32 master weights, all", local.elements, ZR_F32, shared);
  for (const OptimizerDescription& description : plan.input.descriptions)
    for (const zr_slot& slot : description.slots)
      if (local.has_replicas && (slot.flags & ZR_SLOT_UNSHARDED))
        add(MemoryKind::optimizer, std::string(slot.name) + ", all", local.elements, ZR_F32, shared);
  add(MemoryKind::buckets, "compressed messages", local.exchange.scratch, ZR_U8);
}

}  // namespace

LocalPlan local_plan(const MemoryPlan& plan) {
  LocalPlan local;
  if (!plan.input.exchange_plan) return local;
  const std::vector<Parameter>& parameters = plan.input.parameters;
  local.ranges.resize(parameters.size());
  int64_t trainable = 0, owned = 0;
  for (const Parameter& p : parameters) trainable += p.frozen ? 0 : p.count;
  for (const Piece& piece : plan.rank_plan.reduced_gradients) owned += piece.count;
  const bool owns_all = every_rank_owns_all(plan, owned, trainable);
  owns_all ? cut_equally(plan.input, local) : cut_by_owner(plan, local);
  local.has_replicas = !owns_all && has_replicas(plan);
  std::vector<int64_t> counts, served;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    local.offsets.push_back(local.elements);
    local.served_offsets.push_back(local.served);
    if (parameters[i].frozen) continue;
    local.elements += round_up(parameters[i].count, kAlign);
    int64_t of_param = 0;
    for (const ServedRange& range : local.ranges[i]) {
      if (range.rank != plan.rank) continue;
      served.push_back(range.count);
      of_param += range.count;
    }
    local.served += round_up(of_param, kAlign);
    if (parameters[i].count > 0) counts.push_back(parameters[i].count);
  }
  local.exchange = plan.input.exchange_plan(counts, served, plan.input.world);
  add_arrays(plan, local);
  return local;
}

}  // namespace zr::host::plan
