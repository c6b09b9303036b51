// Assigns parts of the training state to tiers, and cuts the states on disk into tiles.
#include "plan/placement.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/dtype.hpp"
#include "base/round_up.hpp"
#include "base/text.hpp"
#include "plan/plan.hpp"

namespace zr::host::plan {

namespace {

// Where the state space may be cut near `element`: the last position at or before it, and the first after that.
struct Cuts {
  int64_t before, after;
};
Cuts cuts_near(const MemoryPlan& plan, int64_t element) {
  const std::vector<int64_t>& starts = plan.rank_plan.state_offset;
  const int64_t end = plan.rank_plan.state_elements;
  if (element >= end) return {end, end};
  const auto after = std::upper_bound(starts.begin(), starts.end(), element);
  if (after == starts.begin()) return {0, after == starts.end() ? end : *after};
  const auto& piece = plan.rank_plan.reduced_gradients[static_cast<std::size_t>(after - starts.begin() - 1)];
  const int64_t start = *(after - 1), next = after == starts.end() ? end : *after,
                block = plan.input.cut_block(piece.param), before = start + (element - start) / block * block;
  return {before, before + block < start + piece.count ? before + block : next};
}
int64_t cut_before(const MemoryPlan& plan, int64_t element) { return cuts_near(plan, element).before; }

// Cuts a range into tiles: enough elements to keep the tier busy, and complete pieces if the optimizer needs them.
void cut_tiles(const MemoryPlan& plan, const StateRange& range, Placement& placement) {
  const TierInfo& tier = plan.input.tiers[static_cast<std::size_t>(range.tier)];
  const std::vector<StateArray>& arrays = plan.rank_plan.state_arrays;
  if (arrays.empty()) return;
  const int64_t tile_elements =
      std::max<int64_t>(
          tier.io_bytes * tier.io_depth / std::max<int64_t>(plan.state_bytes_per_element(), 1) / kNormBlock, 1) *
      kNormBlock;
  const bool elementwise = plan.input.elementwise();
  int64_t end_of_tiles = 0;
  for (const StateTile& tile : placement.tiles)
    if (tile.tier == range.tier) end_of_tiles = tile.offset + tile.bytes;
  for (int64_t first = range.first, end = range.first + range.count; first < end;) {
    int64_t next = std::min(end, first + tile_elements);
    if (!elementwise && next < end)
      next = std::max(cut_before(plan, next), std::min(cuts_near(plan, first).after, end));
    StateTile tile{range.tier, first, next - first, end_of_tiles, 0};
    for (std::size_t a = 0; a < arrays.size(); ++a)
      tile.bytes += round_up(plan.array_range(a, first, tile.count).count * size_of(arrays[a].dtype), tier.align);
    placement.largest_tile = std::max(placement.largest_tile, tile.bytes);
    end_of_tiles += tile.bytes;
    placement.tiles.push_back(tile);
    first = next;
  }
}
// Assigns tiers, one part after another, by the memory that the plan then takes on each tier.
class TierAssigner {
 public:
  explicit TierAssigner(MemoryPlan& plan) : plan_(plan), request_(plan.input.tier_request) {
    plan.placement = {};
    const auto bytes_of = [&](uint32_t role) {
      int64_t bytes = 0;
      for (const Buffer& b : plan.rank_plan.buffers)
        if (b.role == role) bytes += b.bytes(plan.input.location_of(plan.rank));
      return bytes;
    };
    shards_ = bytes_of(ZR_ROLE_WEIGHT_SHARD);
    gradients_ = bytes_of(ZR_ROLE_REDUCED_GRAD);
    // Parts with a fixed tier count from the start; other parts count only when they have a tier.
    plan.placement.shards = std::max(request_.shards, 0);
    plan.placement.reduced_gradients = std::max(request_.reduced_gradients, 0);
    unassigned_bytes_ =
        (request_.shards == kAnyTier ? shards_ : 0) + (request_.reduced_gradients == kAnyTier ? gradients_ : 0);
    if (request_.states != kAnyTier) set_state_ranges({{0, elements_on_device()}, {request_.states, element_count()}});
  }
  void assign() {
    assign_activations();
    has_device_capacity_ &= !request_.state_in_host_memory;
    if (shards_ > 0) assign_buffers("weight shards", "parameters", request_.shards, plan_.placement.shards, shards_);
    if (gradients_ > 0)
      assign_buffers("reduced gradients", "gradients", request_.reduced_gradients, plan_.placement.reduced_gradients,
                     gradients_);
    assign_states();
  }

 private:
  static constexpr int64_t kNoLimit = int64_t{1} << 60;
  int tiers() const { return static_cast<int>(plan_.input.tiers.size()); }
  const TierInfo& info(int tier) const { return plan_.input.tiers[static_cast<std::size_t>(tier)]; }
  int64_t element_count() const { return plan_.rank_plan.state_elements; }
  int64_t bytes_per_element() const { return std::max<int64_t>(plan_.state_bytes_per_element(), 1); }
  int64_t elements_on_device() const {
    return request_.states == 0 ? 0
                                : static_cast<int64_t>(static_cast<double>(element_count()) * request_.device_fraction);
  }

  // Free bytes of a tier; negative if the plan exceeds its capacity.
  int64_t free_bytes(Tier tier) const {
    if (tier == Tier::device && has_device_capacity_ && tiers() > 1)
      return request_.device_capacity - activations_on_device_ -
             (request_.state_in_host_memory ? plan_.unsharded_weight_bytes() : plan_.bytes(tier) - unassigned_bytes_);
    if (tier == Tier::host && request_.host_capacity > 0)
      return request_.host_capacity - plan_.bytes(tier) - activations_on_host_ -
             (request_.snapshot ? plan_.snapshot_bytes() : 0) -
             (request_.copies_gradients ? plan_device_staging(plan_, true).bytes() : 0);
    return kNoLimit;
  }
  int64_t free_bytes(int tier) const { return free_bytes(info(tier).tier); }
  int64_t excess() const {
    return std::max<int64_t>(-free_bytes(Tier::device), 0) + std::max<int64_t>(-free_bytes(Tier::host), 0);
  }
  // The first allowed tier with which no budget is exceeded, else the tier with the smallest excess.
  template <class Try>
  int first_that_fits(bool disks, const Try& with) {
    int best = 0;
    int64_t smallest = kNoLimit;
    for (int tier = 0; tier < tiers(); ++tier) {
      if (!disks && !info(tier).in_memory()) continue;
      with(tier);
      if (excess() < smallest) {
        smallest = excess();
        best = tier;
      }
      if (smallest == 0) break;
    }
    with(best);
    return best;
  }

  void report(const std::string& part, int tier, const std::string& why) {
    plan_.placement.parts.push_back({part, tier, why});
  }
  std::string capacity_text(int tier) const {
    const int64_t bytes_free = free_bytes(tier);
    if (bytes_free > kNoLimit / 2) return info(tier).id + " has no budget";
    return fmt::format("{} has {} left", info(tier).id, bytes_text(std::max<int64_t>(bytes_free, 0)));
  }
  std::vector<std::string> capacities() const {
    std::vector<std::string> texts;
    for (int tier = 0; tier < tiers(); ++tier) texts.push_back(capacity_text(tier));
    return texts;
  }
  static std::string capacities_up_to(const std::vector<std::string>& capacities, int tier) {
    std::string text;
    for (int i = 0; i <= tier; ++i) text += (i ? ", " : "") + capacities[static_cast<std::size_t>(i)];
    return text;
  }
  std::string requested_by(const char* key, int tier) const {
    return fmt::format("offload.{} = \"{}\"", key, info(tier).id);
  }

  void assign_buffers(const std::string& part, const char* key, int requested, int& tier, int64_t bytes) {
    if (requested != kAnyTier) return report(part, requested, requested_by(key, requested));
    const std::vector<std::string> before = capacities();
    unassigned_bytes_ -= bytes;
    const bool disks = &tier != &plan_.placement.shards || !shards_used_in_place();
    tier = first_that_fits(disks, [&](int candidate) { tier = candidate; });
    report(part, tier, fmt::format("auto: {}; {}", bytes_text(bytes), capacities_up_to(before, tier)));
  }
  // True if operators use a shard buffer in place.
  bool shards_used_in_place() const {
    return std::any_of(plan_.rank_plan.weights.begin(), plan_.rank_plan.weights.end(), [&](const Piece& piece) {
      return plan_.rank_plan.buffers[piece.buffer].role == ZR_ROLE_WEIGHT_SHARD && !piece.shard;
    });
  }

  // Activations come first because they are used most often, twice per micro-step. Temporaries stay on the device: half
  // of the bytes, until a run has measured them.
  void assign_activations() {
    const int64_t quarter = request_.device_capacity / 4,
                  known = request_.activations_on_device + request_.activations_offloaded;
    const int64_t bytes = request_.activations_known ? known : quarter;
    const auto assign = [&](int tier) {
      plan_.placement.activations = tier;
      const bool measured_there = tier > 0 && request_.activations_offloaded > 0;
      activations_on_device_ = measured_there ? request_.activations_on_device : tier > 0 ? bytes / 2 : bytes;
      activations_on_host_ =
          info(tier).tier == Tier::host ? (measured_there ? request_.activations_offloaded : bytes) : 0;
    };
    if (request_.activations != kAnyTier) {
      assign(request_.activations);
      return report("activations", request_.activations, requested_by("activations", request_.activations));
    }
    const std::vector<std::string> before = capacities();
    const int tier = first_that_fits(true, assign);
    const std::string what =
        request_.activations_known ? bytes_text(bytes) + " measured; "
        : quarter > 0 ? bytes_text(quarter) + " assumed, a quarter of the budget, until a run has measured them; "
                      : "";
    report("activations", tier, "auto: " + what + capacities_up_to(before, tier));
  }

  // Computes ranges and tiles: for each (tier, end), the elements up to `end` go to `tier`.
  void set_state_ranges(const std::vector<std::pair<int, int64_t>>& ends) {
    Placement& placement = plan_.placement;
    placement.states.clear();
    placement.tiles.clear();
    placement.largest_tile = 0;
    int64_t position = 0;
    for (const auto& [tier, end] : ends) {
      const int64_t cut = std::max(position, cut_before(plan_, std::min(element_count(), end)));
      if (cut > position) placement.states.push_back({tier, position, cut - position});
      position = cut;
    }
    for (const StateRange& range : placement.states)
      if (!info(range.tier).in_memory()) cut_tiles(plan_, range, placement);
  }
  void assign_states() {
    if (plan_.rank_plan.state_arrays.empty()) {
      plan_.placement.states = {{0, 0, element_count()}};
      return report("states", 0, "the optimizer has none");
    }
    if (request_.states != kAnyTier) {
      for (const StateRange& range : plan_.placement.states)
        report(share(range.count), range.tier,
               range.tier == 0 && request_.states != 0
                   ? "offload.device_fraction = " + shortest(request_.device_fraction)
                   : requested_by("optimizer", range.tier));
      return;
    }
    const std::vector<std::string> before = capacities();
    std::vector<std::pair<int, int64_t>> ends;
    int64_t position = 0;
    for (int tier = 0; tier < tiers() && position < element_count(); ++tier) {
      const bool last = tier + 1 == tiers() || !info(tier).in_memory();
      const int64_t fits =
          last ? element_count() - position
               : std::min(element_count() - position, std::max<int64_t>(free_bytes(tier), 0) / bytes_per_element());
      ends.emplace_back(tier, position + fits);
      set_state_ranges(ends);
      position = plan_.placement.states.empty()
                     ? 0
                     : plan_.placement.states.back().first + plan_.placement.states.back().count;
    }
    move_states_to_disk(ends);
    int64_t placed = 0;
    for (const StateRange& range : plan_.placement.states) {
      report(share(range.count), range.tier,
             fmt::format("auto: {}; {}", bytes_text(plan_.state_bytes(placed, element_count() - placed)),
                         capacities_up_to(before, range.tier)));
      placed += range.count;
    }
  }
  // Staging memory of a disk tier takes host memory too: moves states from host memory to the disk until all fits.
  void move_states_to_disk(std::vector<std::pair<int, int64_t>>& ends) {
    if (ends.size() < 2 || info(ends.back().first).in_memory()) return;
    for (auto tier = ends.rbegin() + 1; tier != ends.rend(); ++tier) {
      if (info(tier->first).tier != Tier::host) continue;
      const int64_t begin = tier + 1 == ends.rend() ? 0 : (tier + 1)->second;
      for (int64_t end = end_on(tier->first); free_bytes(Tier::host) < 0 && end > begin; end = end_on(tier->first)) {
        tier->second = std::max(
            begin, end - (-free_bytes(Tier::host) + bytes_per_element() - 1) / bytes_per_element() - kNormBlock);
        set_state_ranges(ends);
      }
    }
  }
  // One past the last element on a tier; 0 if the tier has none.
  int64_t end_on(int tier) const {
    for (const StateRange& range : plan_.placement.states)
      if (range.tier == tier) return range.first + range.count;
    return 0;
  }
  std::string share(int64_t count) const {
    if (count == element_count()) return "states, all";
    return fmt::format("states, {} %", (100 * count + element_count() / 2) / element_count());
  }

  MemoryPlan& plan_;
  const TierRequest& request_;
  bool has_device_capacity_ = request_.device_capacity > 0;  // for the part that is being assigned
  int64_t shards_ = 0, gradients_ = 0;                       // bytes
  int64_t unassigned_bytes_ = 0;  // bytes that the plan counts on the device until their tier is known
  int64_t activations_on_device_ = 0, activations_on_host_ = 0;  // bytes of activations: on the device, in host memory
};
}  // namespace

int MemoryPlan::tier_of(const Buffer& buffer) const {
  return buffer.role == ZR_ROLE_REDUCED_GRAD   ? placement.reduced_gradients
         : buffer.role == ZR_ROLE_WEIGHT_SHARD ? placement.shards
                                               : 0;
}

int64_t MemoryPlan::staging_bytes() const {
  return std::min(kTilesInFlight, std::ssize(placement.tiles)) * placement.largest_tile;
}

int64_t MemoryPlan::activation_staging_bytes() const {
  const TierInfo& tier = input.tiers[static_cast<std::size_t>(placement.activations)];
  return tier.tier == Tier::disk ? 2 * tier.io_bytes * tier.io_depth : 0;  // requests in flight, and requests that wait
}

int64_t MemoryPlan::tier_overhead_bytes(const TierInfo& tier) const {
  int64_t stored = 0;
  const auto here = [&](int index) { return &input.tiers[static_cast<std::size_t>(index)] == &tier; };
  for (const Buffer& b : rank_plan.buffers)
    if (here(tier_of(b))) stored += round_up(b.bytes(input.location_of(rank)), tier.align);
  for (const StateTile& tile : placement.tiles)
    if (here(tile.tier)) stored += tile.bytes;
  return stored / (1 << 20) * tier.host_bytes_per_mib + stored % (1 << 20) * tier.host_bytes_per_mib / (1 << 20);
}

void assign_tiers(MemoryPlan& plan) { TierAssigner(plan).assign(); }

bool MemoryPlan::has_offloaded_states() const {
  return std::ranges::any_of(placement.states, [](const StateRange& range) { return range.tier != 0 && range.count; });
}

std::string MemoryPlan::placement_text() const {
  std::string text;
  if (input.tiers.size() == 1) return text;
  for (const TierAssignment& assignment : placement.parts) {
    text += fmt::format("  placement      {:<17}  on {:<8}  {}\n", assignment.part,
                        input.tiers[static_cast<std::size_t>(assignment.tier)].id, assignment.why);
  }
  if (!update_time.empty()) text += fmt::format("  update         states on tiers    {}\n", update_time);
  return text;
}

}  // namespace zr::host::plan
