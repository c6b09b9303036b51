// Which part of the training state stands where, and in what pieces it goes there and back.
#include "plan/placement.hpp"

#include <algorithm>
#include <cstdio>

#include "base/dtype.hpp"
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

// The last place at or before `element` where the state space may be cut.
int64_t cut_before(const Plan& plan, int64_t element) {
  const std::vector<int64_t>& starts = plan.mine.state_offset;
  if (element >= plan.mine.state_elements) return plan.mine.state_elements;
  const auto after = std::upper_bound(starts.begin(), starts.end(), element);
  if (after == starts.begin()) return 0;
  const int64_t start = *(after - 1);
  return plan.input.wanted.elementwise ? start + (element - start) / kLeaf * kLeaf : start;
}

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
// Finds places, one part after another, by what the plan then takes of each kind of memory.
class Filling {
 public:
  explicit Filling(Plan& plan) : plan_(plan), wanted_(plan.input.wanted) {
    plan.placement = {};
    const auto bytes_of = [&](uint32_t role) {
      int64_t bytes = 0;
      for (const Buffer& b : plan.mine.buffers)
        if (b.role == role) bytes += b.bytes(plan.rank, plan.input.world);
      return bytes;
    };
    shards_ = bytes_of(ZR_ROLE_SHARD);
    sums_ = bytes_of(ZR_ROLE_SUM);
    // What has its place takes its room before anything looks for one; the rest takes none until it has one.
    plan.placement.shards = std::max(wanted_.shards, 0);
    plan.placement.sums = std::max(wanted_.sums, 0);
    undecided_ = (wanted_.shards == kAnyPlace ? shards_ : 0) + (wanted_.sums == kAnyPlace ? sums_ : 0);
    if (wanted_.states != kAnyPlace) put_states({{0, stays()}, {wanted_.states, all()}});
  }
  void fill() {
    activations();
    if (shards_ > 0) decide("weight shards", "parameters", wanted_.shards, plan_.placement.shards, shards_);
    if (sums_ > 0) decide("gradient sums", "gradients", wanted_.sums, plan_.placement.sums, sums_);
    states();
  }

 private:
  static constexpr int64_t kNoLimit = int64_t{1} << 60;
  int places() const { return static_cast<int>(plan_.input.places.size()); }
  const TierFacts& facts(int place) const { return plan_.input.places[static_cast<std::size_t>(place)]; }
  int64_t all() const { return plan_.mine.state_elements; }
  int64_t each() const { return std::max<int64_t>(state_bytes(plan_), 1); }
  int64_t stays() const {
    return wanted_.states == 0 ? 0 : static_cast<int64_t>(static_cast<double>(all()) * wanted_.fraction);
  }

  // What is left of a kind of memory, below nothing where more is taken.
  int64_t left(Tier tier) const {
    if (tier == Tier::device && wanted_.device_room > 0 && places() > 1)
      return wanted_.device_room - plan_.bytes(tier) + undecided_ - here_;
    if (tier == Tier::host && wanted_.host_room > 0)
      return wanted_.host_room - plan_.bytes(tier) - aside_ - (wanted_.snapshot ? plan_.snapshot_bytes() : 0);
    return kNoLimit;
  }
  int64_t left(int place) const { return left(facts(place).tier); }
  int64_t excess() const { return std::max<int64_t>(-left(Tier::device), 0) + std::max<int64_t>(-left(Tier::host), 0); }
  // The first place of those allowed with which nothing is over its budget, else that with which least is.
  template <class Try>
  int first_that_fits(bool disks, const Try& with) {
    int best = 0;
    int64_t least = kNoLimit;
    for (int place = 0; place < places(); ++place) {
      if (!disks && !facts(place).in_memory()) continue;
      with(place);
      if (excess() < least) {
        least = excess();
        best = place;
      }
      if (least == 0) break;
    }
    with(best);
    return best;
  }

  void tell(const std::string& part, int place, const std::string& why) {
    plan_.placement.parts.push_back({part, place, why});
  }
  std::string room_text(int place) const {
    const int64_t room = left(place);
    return facts(place).id +
           (room > kNoLimit / 2 ? " has no budget" : " has " + bytes_text(std::max<int64_t>(room, 0)) + " left");
  }
  std::vector<std::string> rooms() const {
    std::vector<std::string> texts;
    for (int place = 0; place < places(); ++place) texts.push_back(room_text(place));
    return texts;
  }
  static std::string upto(const std::vector<std::string>& rooms, int place) {
    std::string text;
    for (int i = 0; i <= place; ++i) text += (i ? ", " : "") + rooms[static_cast<std::size_t>(i)];
    return text;
  }
  std::string asked_for(const char* key, int place) const {
    return std::string("offload.") + key + " = \"" + facts(place).id + "\"";
  }

  void decide(const std::string& part, const char* key, int asked, int& place, int64_t bytes) {
    if (asked != kAnyPlace) return tell(part, asked, asked_for(key, asked));
    const std::vector<std::string> before = rooms();
    undecided_ -= bytes;
    const bool disks = &place != &plan_.placement.shards || !whole_shards();
    place = first_that_fits(disks, [&](int at) { place = at; });
    tell(part, place, "auto: " + bytes_text(bytes) + "; " + upto(before, place));
  }
  // Shards that operators use where they stand.
  bool whole_shards() const {
    return std::any_of(plan_.mine.weights.begin(), plan_.mine.weights.end(), [&](const Piece& piece) {
      return plan_.mine.buffers[piece.buffer].role == ZR_ROLE_SHARD && !piece.shard;
    });
  }

  // Wanted most often, twice a micro-step. Temporaries stay on the device: half, until it is measured.
  void activations() {
    const int64_t quarter = wanted_.device_room / 4, known = wanted_.activations_here + wanted_.activations_aside;
    const int64_t bytes = wanted_.activations_known ? known : quarter;
    const auto put = [&](int place) {
      plan_.placement.activations = place;
      const bool measured_there = place > 0 && wanted_.activations_aside > 0;
      here_ = measured_there ? wanted_.activations_here : place > 0 ? bytes / 2 : bytes;
      aside_ = facts(place).tier == Tier::host ? (measured_there ? wanted_.activations_aside : bytes) : 0;
    };
    if (wanted_.activations != kAnyPlace) {
      put(wanted_.activations);
      return tell("activations", wanted_.activations, asked_for("activations", wanted_.activations));
    }
    const std::vector<std::string> before = rooms();
    const int place = first_that_fits(true, put);
    const std::string what = wanted_.activations_known ? bytes_text(bytes) + " measured; "
                             : quarter > 0 ? bytes_text(quarter) + ", a quarter until a run has measured them; "
                                           : "";
    tell("activations", place, "auto: " + what + upto(before, place));
  }

  // Runs and tiles: elements up to `end` on each place, one after another.
  void put_states(const std::vector<std::pair<int, int64_t>>& ends) {
    Placement& placement = plan_.placement;
    placement.states.clear();
    placement.tiles.clear();
    placement.largest_tile = 0;
    int64_t at = 0;
    for (const auto& [place, end] : ends) {
      const int64_t cut = std::max(at, cut_before(plan_, std::min(all(), end)));
      if (cut > at) placement.states.push_back({place, at, cut - at});
      at = cut;
    }
    for (const StateRun& run : placement.states)
      if (!facts(run.place).in_memory()) cut_tiles(plan_, run, placement);
  }
  void states() {
    if (plan_.state_arrays().empty()) {
      plan_.placement.states = {{0, 0, all()}};
      return tell("states", 0, "none: the optimizer keeps none");
    }
    if (wanted_.states != kAnyPlace) {
      for (const StateRun& run : plan_.placement.states)
        tell(share(run.count), run.place,
             run.place == 0 && wanted_.states != 0 ? "offload.device_fraction = " + shortest(wanted_.fraction)
                                                   : asked_for("optimizer", run.place));
      return;
    }
    const std::vector<std::string> before = rooms();
    std::vector<std::pair<int, int64_t>> ends;
    int64_t at = 0;
    for (int place = 0; place < places() && at < all(); ++place) {
      const bool last = place + 1 == places() || !facts(place).in_memory();
      const int64_t fits = last ? all() - at : std::min(all() - at, std::max<int64_t>(left(place), 0) / each());
      ends.emplace_back(place, at + fits);
      put_states(ends);
      at = plan_.placement.states.empty() ? 0
                                          : plan_.placement.states.back().first + plan_.placement.states.back().count;
    }
    give_way(ends);
    int64_t placed = 0;
    for (const StateRun& run : plan_.placement.states) {
      tell(share(run.count), run.place,
           "auto: " + bytes_text((all() - placed) * each()) + "; " + upto(before, run.place));
      placed += run.count;
    }
  }
  // Tiles and what a disk keeps take of host memory too: states in it give way until all has room.
  void give_way(std::vector<std::pair<int, int64_t>>& ends) {
    if (ends.size() < 2 || facts(ends.back().first).in_memory()) return;
    for (auto place = ends.rbegin() + 1; place != ends.rend(); ++place) {
      if (facts(place->first).tier != Tier::host) continue;
      const int64_t begin = place + 1 == ends.rend() ? 0 : (place + 1)->second;
      for (int64_t end = end_on(place->first); left(Tier::host) < 0 && end > begin; end = end_on(place->first)) {
        place->second = std::max(begin, end - (-left(Tier::host) + each() - 1) / each() - kLeaf);
        put_states(ends);
      }
    }
  }
  // The last element on a place, and one; 0 if there is none.
  int64_t end_on(int place) const {
    for (const StateRun& run : plan_.placement.states)
      if (run.place == place) return run.first + run.count;
    return 0;
  }
  std::string share(int64_t count) const {
    return "states, " + (count == all() ? "all" : std::to_string((100 * count + all() / 2) / all()) + " %");
  }

  Plan& plan_;
  const Wanted& wanted_;
  int64_t shards_ = 0, sums_ = 0;  // bytes
  int64_t undecided_ = 0;          // of them, that the plan has on the device until they have a place
  int64_t here_ = 0, aside_ = 0;   // of activations: on the device, in host memory
};
}  // namespace

int Plan::place_of(const Buffer& buffer) const {
  return buffer.role == ZR_ROLE_SUM ? placement.sums : buffer.role == ZR_ROLE_SHARD ? placement.shards : 0;
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

void place(Plan& plan) { Filling(plan).fill(); }

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
