// Which part of the training state stands where, and in what pieces it goes there and back.
#include "plan/placement.hpp"

#include <algorithm>
#include <cstdio>
#include <map>

#include "base/dtype.hpp"
#include "base/text.hpp"
#include "plan/paging.hpp"
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

// Fills one place after another: what is left of the room of each kind of memory, what goes where, and why.
class Filling {
 public:
  Filling(Plan& plan, int64_t shards, int64_t sums) : plan_(plan) {
    const Wanted& wanted = plan.input.wanted;
    const bool anywhere_else = plan.input.places.size() > 1;
    if (anywhere_else && wanted.device_room) left_[Tier::device] = wanted.device_room - plan.bytes_without_placed();
    if (wanted.host_room) left_[Tier::host] = wanted.host_room;
    for (const TierFacts& place : plan.input.places)  // tiles pass through host memory
      if (place.tier == Tier::disk)
        left_[Tier::host] -= kTilesUnderWay * std::max(place.io_bytes * place.io_depth, kLeaf * state_bytes(plan));
    // What has its place takes its room before anything looks for one.
    if (wanted.shards != kAnyPlace) take(wanted.shards, shards);
    if (wanted.sums != kAnyPlace) take(wanted.sums, sums);
    if (wanted.states == kAnyPlace) return;
    const int64_t states = plan.mine.state_elements * state_bytes(plan), stays = stays_on_device(states);
    take(0, stays);
    take(wanted.states, states - stays);
  }
  // All of it on `asked`, or on the first place with room.
  int whole(const std::string& part, const char* key, int asked, int64_t bytes) {
    if (asked != kAnyPlace) {
      tell(part, asked, asked_for(key, asked));
      return asked;
    }
    int place = 0;
    std::string rooms = room_text(0);
    while (place + 1 < places() && left(place) < bytes) rooms += ", " + room_text(++place);
    tell(part, place, "auto: " + bytes_text(bytes) + "; " + rooms);
    take(place, bytes);
    return place;
  }
  void states() {
    const Wanted& wanted = plan_.input.wanted;
    const int64_t all = plan_.mine.state_elements, each = std::max<int64_t>(state_bytes(plan_), 1);
    std::vector<StateRun>& runs = plan_.placement.states;
    int64_t at = 0;
    if (plan_.state_arrays().empty()) {
      runs = {{0, 0, all}};
      return;
    }
    const auto put = [&](int place, int64_t upto, const std::string& why) {
      const int64_t end = std::max(at, cut_before(plan_, std::min(all, upto)));
      if (end == at) return;
      runs.push_back({place, at, end - at});
      if (wanted.states == kAnyPlace) take(place, (end - at) * each);
      tell("states, " + share(end - at, all), place, why);
      at = end;
    };
    if (wanted.states == kAnyPlace) {
      for (int place = 0; place + 1 < places(); ++place)
        put(place, at + std::max<int64_t>(left(place), 0) / each,
            "auto: " + bytes_text((all - at) * each) + "; " + room_text(place));
      std::string rooms;
      for (int place = 0; place < places(); ++place) rooms += (place ? ", " : "") + room_text(place);
      put(places() - 1, all, "auto: " + bytes_text((all - at) * each) + "; " + rooms);
    } else {
      put(0, stays_on_device(all), "offload.fraction = " + shortest(wanted.fraction));
      put(wanted.states, all, asked_for("optimizer", wanted.states));
    }
  }
  // Activations are wanted most often, twice a micro-step; temporaries stay on the device wherever they stand.
  int activations() {
    const Wanted& wanted = plan_.input.wanted;
    const int64_t known = wanted.activations_here + wanted.activations_aside, quarter = wanted.device_room / 4;
    const int64_t bytes = known > 0 ? known : quarter;
    int place = wanted.activations;
    std::string why = place >= 0 ? asked_for("activations", place) : "";
    if (place == kAnyPlace) {
      place = left(0) >= bytes || places() == 1 ? 0 : 1;
      why = known > 0     ? bytes_text(bytes) + " measured; "
            : quarter > 0 ? "a quarter until a run has measured them; "
                          : "";
      why = "auto: " + why + room_text(0);
    }
    tell("activations", place, why);
    if (place == 0) {
      take(0, bytes);
    } else {
      const bool measured_there = wanted.activations_aside > 0;
      take(0, measured_there ? wanted.activations_here : std::min(bytes, quarter));
      take(place, measured_there ? wanted.activations_aside : known);
    }
    return place;
  }
  void take_host(int64_t bytes) { left_[Tier::host] -= bytes; }

 private:
  static constexpr int64_t kNoLimit = int64_t{1} << 60;
  int64_t stays_on_device(int64_t all) const {
    const Wanted& wanted = plan_.input.wanted;
    return wanted.states == 0 ? 0 : static_cast<int64_t>(static_cast<double>(all) * wanted.fraction);
  }
  int places() const { return static_cast<int>(plan_.input.places.size()); }
  const TierFacts& facts(int place) const { return plan_.input.places[static_cast<std::size_t>(place)]; }
  int64_t left(int place) const { return left_.at(facts(place).tier); }
  void take(int place, int64_t bytes) {
    left_[facts(place).tier] -= bytes;
    left_[Tier::host] -= bytes / (1 << 20) * facts(place).kept_per_mib;
  }
  void tell(const std::string& part, int place, const std::string& why) {
    plan_.placement.parts.push_back({part, place, why});
  }
  std::string room_text(int place) const {
    return facts(place).id + (left(place) > kNoLimit / 2
                                  ? " has no budget"
                                  : " has " + bytes_text(std::max<int64_t>(left(place), 0)) + " left");
  }
  std::string asked_for(const char* key, int place) const {
    return std::string("offload.") + key + " = \"" + facts(place).id + "\"";
  }
  static std::string share(int64_t part, int64_t all) {
    return part == all ? "all" : std::to_string((100 * part + all / 2) / all) + " %";
  }

  Plan& plan_;
  std::map<Tier, int64_t> left_{{Tier::device, kNoLimit}, {Tier::host, kNoLimit}, {Tier::disk, kNoLimit}};
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

int64_t Plan::kept_bytes(const TierFacts& place) const {
  int64_t stored = 0;
  const auto here = [&](int index) { return &input.places[static_cast<std::size_t>(index)] == &place; };
  for (const Buffer& b : mine.buffers)
    if (here(place_of(b))) stored += up(b.bytes(rank, input.world), place.align);
  for (const StateTile& tile : placement.tiles)
    if (here(tile.place)) stored += tile.bytes;
  return stored / (1 << 20) * place.kept_per_mib + stored % (1 << 20) * place.kept_per_mib / (1 << 20);
}

void place(Plan& plan) {
  const Wanted& wanted = plan.input.wanted;
  plan.placement = {};
  const int64_t shards = buffers_of(plan, {ZR_ROLE_SHARD}), sums = buffers_of(plan, {ZR_ROLE_SUM});
  Filling filling(plan, shards, sums);
  // What is used most often stands nearest.
  plan.placement.activations = filling.activations();
  if (shards > 0) plan.placement.shards = filling.whole("weight shards", "parameters", wanted.shards, shards);
  plan.placement.sums =
      sums > 0 ? filling.whole("gradient sums", "gradients", wanted.sums, sums) : std::max(wanted.sums, 0);
  filling.take_host(paging_of(plan).bytes() + plan.activation_staging_bytes());
  filling.states();
  for (const StateRun& run : plan.placement.states)
    if (!plan.input.places[static_cast<std::size_t>(run.place)].in_memory()) cut_tiles(plan, run, plan.placement);
}

std::string Plan::placement_text() const {
  std::string text;
  if (input.places.size() == 1) return text;
  for (const PlacedPart& one : placement.parts) {
    char line[400];
    std::snprintf(line, sizeof line, "  placement    %-15s  on %-8s  %s\n", one.part.c_str(),
                  input.places[static_cast<std::size_t>(one.place)].id.c_str(), one.why.c_str());
    text += line;
  }
  return text;
}

}  // namespace zr::host
