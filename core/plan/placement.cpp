// Which part of the training state stands where, and in what pieces it goes there and back.
#include "plan/placement.hpp"

#include <algorithm>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/text.hpp"
#include "plan/plan.hpp"

namespace zr::host {

namespace {
int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

int64_t state_bytes(const Plan& plan) {  // of an element, all arrays
  int64_t bytes = 0;
  for (const Plan::StateArray& array : plan.state_arrays()) bytes += size_of(array.dtype);
  return bytes;
}

int64_t buffers_of(const Plan& plan, std::initializer_list<uint32_t> roles) {
  int64_t bytes = 0;
  for (const Buffer& b : plan.mine.buffers)
    if (std::find(roles.begin(), roles.end(), b.role) != roles.end()) bytes += b.bytes(plan.rank, plan.input.world);
  return bytes;
}

// The last place at or before `element` where the state space may be cut.
int64_t cut_before(const Plan& plan, int64_t element) {
  const std::vector<int64_t>& starts = plan.mine.state_offset;
  if (element >= plan.mine.state_elements) return plan.mine.state_elements;
  const auto after = std::upper_bound(starts.begin(), starts.end(), element);
  if (after == starts.begin()) return 0;
  const int64_t start = *(after - 1);
  return plan.input.wanted.elementwise ? start + (element - start) / kLeaf * kLeaf : start;
}

// Fills one place after another: what is left of the room of a place, and what goes there.
class Filling {
 public:
  explicit Filling(const Plan& plan) : plan_(plan) {
    const Wanted& wanted = plan.input.wanted;
    const int64_t fixed = plan.bytes_without_placed();
    for (const TierFacts& place : plan.input.places) {
      constexpr int64_t kNoLimit = int64_t{1} << 62;
      room_.push_back(place.tier == Tier::device ? (wanted.device_room ? wanted.device_room - fixed : kNoLimit)
                      : place.tier == Tier::host ? (wanted.host_room ? wanted.host_room : kNoLimit)
                                                 : kNoLimit);
    }
    for (const TierFacts& place : plan.input.places)  // tiles pass through host memory
      if (place.tier == Tier::disk)
        for (std::size_t i = 0; i < room_.size(); ++i)
          if (plan.input.places[i].tier == Tier::host)
            room_[i] -= kTilesUnderWay * std::max(place.io_bytes * place.io_depth, kLeaf * state_bytes(plan));
    if (plan.input.places.size() == 1) room_[0] = int64_t{1} << 62;  // there is nowhere else
  }
  // All of it on `asked`, or on the first place with room.
  int whole(int asked, int64_t bytes) {
    int place = asked;
    if (asked == kAnyPlace)
      for (place = 0; place + 1 < std::ssize(room_) && room_[static_cast<std::size_t>(place)] < bytes;) ++place;
    room_[static_cast<std::size_t>(place)] -= bytes;
    return place;
  }
  std::vector<StateRun> states() {
    const Wanted& wanted = plan_.input.wanted;
    const int64_t all = plan_.mine.state_elements, each = std::max<int64_t>(state_bytes(plan_), 1);
    std::vector<StateRun> runs;
    int64_t at = 0;
    if (plan_.state_arrays().empty()) return {{0, 0, all}};
    const auto take = [&](int place, int64_t upto) {
      const int64_t end = std::max(at, cut_before(plan_, std::min(all, upto)));
      if (end > at) runs.push_back({place, at, end - at});
      at = end;
    };
    if (wanted.states == kAnyPlace) {
      for (std::size_t place = 0; place + 1 < room_.size(); ++place)
        take(static_cast<int>(place), at + std::max<int64_t>(room_[place], 0) / each);
      take(static_cast<int>(room_.size()) - 1, all);
    } else {
      if (wanted.states != 0) take(0, static_cast<int64_t>(static_cast<double>(all) * wanted.fraction));
      take(wanted.states, all);
    }
    return runs;
  }

 private:
  const Plan& plan_;
  std::vector<int64_t> room_;  // by place
};

// Tiles of a run: as many elements as keep the place busy, whole pieces where the optimizer wants them.
void cut_tiles(const Plan& plan, const StateRun& run, Placement& placement) {
  const TierFacts& place = plan.input.places[static_cast<std::size_t>(run.place)];
  const std::vector<Plan::StateArray> arrays = plan.state_arrays();
  if (arrays.empty()) return;
  const int64_t wanted =
      std::max<int64_t>(place.io_bytes * place.io_depth / std::max<int64_t>(state_bytes(plan), 1) / kLeaf, 1) * kLeaf;
  int64_t slot = 0;
  for (const StateTile& tile : placement.tiles)
    if (tile.place == run.place) slot = tile.at + tile.bytes;
  for (int64_t first = run.first, end = run.first + run.count; first < end;) {
    int64_t next = std::min(end, first + wanted);
    if (!plan.input.wanted.elementwise && next < end) {
      const auto& starts = plan.mine.state_offset;
      const auto after = std::upper_bound(starts.begin(), starts.end(), first);
      next = std::max(cut_before(plan, next), after == starts.end() ? end : std::min(*after, end));
    }
    StateTile tile{run.place, first, next - first, slot, 0};
    for (const Plan::StateArray& array : arrays) tile.bytes += up(tile.count * size_of(array.dtype), place.align);
    placement.largest_tile = std::max(placement.largest_tile, tile.bytes);
    slot += tile.bytes;
    placement.tiles.push_back(tile);
    first = next;
  }
}
}  // namespace

int Plan::place_of(const Buffer& buffer) const {
  return buffer.role == ZR_ROLE_SUM ? placement.sums : buffer.role == ZR_ROLE_SHARD ? placement.shards : 0;
}

int64_t Plan::bytes_without_placed() const {
  int64_t bytes = working_bytes();
  for (const Buffer& b : mine.buffers)
    if (b.role != ZR_ROLE_SUM && b.role != ZR_ROLE_SHARD) bytes += b.bytes(rank, input.world);
  return bytes;
}

std::vector<Plan::StateArray> Plan::state_arrays() const {
  std::vector<StateArray> arrays;
  if (has_master) arrays.push_back({"fp32 master weights", ZR_F32});
  for (const zr_slot& slot : input.slots) arrays.push_back({slot.name, slot.dtype});
  return arrays;
}

int64_t Plan::staging_bytes() const {
  return std::min(kTilesUnderWay, std::ssize(placement.tiles)) * placement.largest_tile;
}

int64_t Plan::activation_staging_bytes() const {
  const TierFacts& place = input.places[static_cast<std::size_t>(placement.activations)];
  return place.tier == Tier::disk ? 2 * place.io_bytes * place.io_depth : 0;  // what is on its way, and what waits
}

void place(Plan& plan) {
  Filling filling(plan);
  const Wanted& wanted = plan.input.wanted;
  plan.placement = {};
  const int64_t shards = buffers_of(plan, {ZR_ROLE_SHARD}), sums = buffers_of(plan, {ZR_ROLE_SUM});
  // What is used most often stands nearest.
  plan.placement.shards = shards > 0 ? filling.whole(wanted.shards, shards) : 0;
  plan.placement.sums = filling.whole(wanted.sums, sums);
  plan.placement.states = filling.states();
  plan.placement.activations = std::max(wanted.activations, 0);
  for (const StateRun& run : plan.placement.states)
    if (!plan.input.places[static_cast<std::size_t>(run.place)].in_memory()) cut_tiles(plan, run, plan.placement);
}

}  // namespace zr::host
