#include "offload/states.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/text.hpp"

namespace zr::host {

namespace {
int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
}  // namespace

States::States(const Plan& plan, Tiers& tiers, Ledger& ledger)
    : plan_(plan), tiers_(tiers), arrays_(plan.state_arrays()) {
  const auto kind = [&](std::size_t array) { return plan_.has_master && array == 0 ? Kind::master : Kind::slots; };
  slots_.resize(plan.input.places.size());
  for (const StateRun& at : plan.placement.states) {
    runs_.push_back({at, {}, {}, {}});
    Run& run = runs_.back();
    if (!in_memory(at.place)) continue;
    for (std::size_t a = 0; a < arrays_.size(); ++a) {
      const int64_t bytes = at.count * size_of(arrays_[a].dtype);
      if (at.place == 0) {
        run.owned.emplace_back(bytes, kPage, ledger, Tier::device, kind(a), arrays_[a].name);
        run.memory.push_back(run.owned.back().data());
      } else {
        TierStore& tier = *tiers_[static_cast<std::size_t>(at.place)];
        run.slots.emplace_back(tier, bytes, std::vector<TierStore::Held>{{kind(a), arrays_[a].name, bytes}});
        run.memory.push_back(tier.map(run.slots.back().id()));
        std::memset(run.memory.back(), 0, static_cast<std::size_t>(bytes));
      }
    }
  }
  const std::vector<StateTile>& tiles = plan.placement.tiles;
  written_.assign(tiles.size(), std::vector<char>(arrays_.size(), 0));
  if (tiles.empty()) return;
  for (std::size_t place = 1; place < tiers_.size(); ++place) {
    int64_t bytes = 0, elements = 0;
    for (const StateTile& tile : tiles) {
      if (tile.place != static_cast<int>(place)) continue;
      bytes = tile.at + tile.bytes;
      elements += tile.count;
    }
    std::vector<TierStore::Held> held;
    for (std::size_t a = 0; a < arrays_.size(); ++a)
      held.push_back({kind(a), arrays_[a].name, elements * size_of(arrays_[a].dtype)});
    if (bytes > 0) slots_[place] = OwnedSlot(*tiers_[place], bytes, std::move(held));
  }
  std::vector<TierStore*> disks;
  int64_t align = kPage;
  for (const auto& tier : tiers_) {
    if (!tier || tier->facts().in_memory()) continue;
    disks.push_back(tier.get());
    align = std::max(align, tier->facts().align);
  }
  room_ = CountedMemory(plan.staging_bytes(), align, ledger, Tier::host, Kind::staging, "tiles under way");
  announced_ = Announced(room_.data(), room_.bytes(), std::move(disks));
  rooms_.resize(static_cast<std::size_t>(std::min(kTilesUnderWay, std::ssize(tiles))));
}

std::vector<StateRun> States::runs(int64_t first, int64_t count) const {
  std::vector<StateRun> runs;
  for (const Run& run : runs_) {
    const int64_t begin = std::max(first, run.at.first), end = std::min(first + count, run.at.first + run.at.count);
    if (begin < end) runs.push_back({run.at.place, begin, end - begin});
  }
  return runs;
}

const States::Run& States::run_of(int64_t element) const {
  for (const Run& run : runs_)
    if (run.at.first <= element && element < run.at.first + run.at.count) return run;
  fail_bug("there is no state " + std::to_string(element));
}

zr_view States::view(std::size_t array, int64_t first, int64_t count) const {
  const Run& run = run_of(first);
  const zr_dtype dtype = arrays_[array].dtype;
  if (run.memory.empty()) return {nullptr, count, dtype, 0, {1, 0}};
  return {static_cast<char*>(run.memory[array]) + (first - run.at.first) * size_of(dtype), count, dtype, 0, {1, 0}};
}

int64_t States::place_in_tile(const StateTile& tile, std::size_t array) const {
  int64_t at = 0;
  for (std::size_t a = 0; a < array; ++a)
    at += up(tile.count * size_of(arrays_[a].dtype), plan_.input.places[static_cast<std::size_t>(tile.place)].align);
  return at;
}

void States::wait(Transfer& transfer, double& seconds, const char* what) {
  const auto begin = std::chrono::steady_clock::now();
  transfer.wait();
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (told_) told_(what, begin);
}

void States::visit(std::size_t array, int64_t first, int64_t count, Use use, const std::string& what,
                   const std::function<void(void*, int64_t, int64_t)>& fn) {
  const std::vector<StateTile>& tiles = plan_.placement.tiles;
  for (const StateRun& run : runs(first, count)) {
    if (in_memory(run.place)) {
      fn(view(array, run.first, run.count).data, run.first, run.count);
      continue;
    }
    auto tile = std::upper_bound(tiles.begin(), tiles.end(), run.first,
                                 [](int64_t element, const StateTile& t) { return element < t.first; }) -
                tiles.begin() - 1;
    for (int64_t at = run.first; at < run.first + run.count; ++tile) {
      const StateTile& one = tiles[static_cast<std::size_t>(tile)];
      const int64_t n = std::min(run.first + run.count, one.first + one.count) - at;
      visit_tile(static_cast<std::size_t>(tile), array, at, n, use, what, fn);
      at += n;
    }
  }
}

// Through the first room, which no pass uses then. Whole blocks are read and written, so the edges of what is written
// are read before.
void States::visit_tile(std::size_t index, std::size_t array, int64_t first, int64_t count, Use use,
                        const std::string& what, const std::function<void(void*, int64_t, int64_t)>& fn) {
  steps_.clear();  // what was read ahead is read again
  started_ = 0;
  for (Transfer& transfer : rooms_) transfer.wait();
  const StateTile& tile = plan_.placement.tiles[index];
  TierStore& store = store_of(tile);
  const int64_t size = size_of(arrays_[array].dtype), align = store.facts().align;
  const int64_t from = (first - tile.first) * size, to = from + count * size;
  int64_t begin = from / align * align, end = up(to, align);
  const int64_t at = tile.at + place_in_tile(tile, array);
  char* const room = room_.data();
  char& was_written = written_[index][array];
  if (!was_written) {
    if (use != Use::read) {
      begin = 0;
      end = up(tile.count * size, align);
    }
    std::memset(room, 0, static_cast<std::size_t>(end - begin));
  } else if (use != Use::write || begin != from || end != to) {
    Transfer reading = store.read(slot_of(tile), at + begin, room, end - begin, what);
    reading.wait();
  }
  fn(room + (from - begin), first, count);
  if (use == Use::read) return;
  Transfer writing = store.write(slot_of(tile), at + begin, room, end - begin, what);
  writing.wait();
  was_written = 1;
}

std::string States::name_of(const std::vector<Part>& parts) const {
  const auto name = [&](const Part& part) { return "'" + plan_.input.parameters[part.unit->param].name + "'"; };
  std::string text = "states of " + name(parts.front());
  if (parts.front().unit->param != parts.back().unit->param) text += " to " + name(parts.back());
  return text;
}

void States::start_read(std::size_t index) {
  Step& step = steps_[index];
  const StateTile& tile = plan_.placement.tiles[step.tile];
  Transfer& behind = rooms_[index % rooms_.size()];
  wait(behind, waits_.write, "wait: write");
  const std::vector<char>& written = written_[step.tile];
  if (std::find(written.begin(), written.end(), 0) == written.end()) {
    step.read = store_of(tile).read(slot_of(tile), tile.at, room(index), tile.bytes, step.what);
    return;
  }
  std::memset(room(index), 0, static_cast<std::size_t>(tile.bytes));
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    if (!written[a]) continue;
    const int64_t at = place_in_tile(tile, a),
                  bytes = up(tile.count * size_of(arrays_[a].dtype), store_of(tile).facts().align);
    step.read = store_of(tile).read(slot_of(tile), tile.at + at, room(index) + at, bytes, step.what);
    step.read.wait();  // in the first pass only
  }
}

std::vector<States::Step> States::steps_of(const std::vector<Unit>& units, const std::vector<char>* touched) const {
  std::vector<Step> steps;
  const std::vector<StateTile>& tiles = plan_.placement.tiles;
  std::size_t next = 0;  // the first unit that reaches into the tile
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    Step step{t, {}, "", {}};
    const int64_t begin = tiles[t].first, end = begin + tiles[t].count;
    bool wanted = false;
    while (next < units.size() && units[next].state + units[next].count <= begin) ++next;
    for (std::size_t u = next; u < units.size() && units[u].state < end; ++u) {
      const int64_t first = std::max(begin, units[u].state), last = std::min(end, units[u].state + units[u].count);
      step.parts.push_back({&units[u], first, last - first});
      wanted |= !touched || (*touched)[units[u].param];
    }
    if (!wanted) continue;
    step.what = name_of(step.parts);
    steps.push_back(std::move(step));
  }
  return steps;
}

void States::read_ahead(const std::vector<Unit>& units) {
  if (rooms_.empty()) return;
  for (Transfer& behind : rooms_) wait(behind, waits_.write, "wait: write");  // tiles may change rooms
  steps_ = steps_of(units, nullptr);
  const std::size_t ahead = std::max<std::size_t>(rooms_.size() - 1, 1);
  for (started_ = 0; started_ < std::min(steps_.size(), ahead); ++started_) start_read(started_);
}

// The units of a tile, with their states where they were read to.
std::vector<Unit> States::units_in(const Step& step, std::size_t index) const {
  const StateTile& tile = plan_.placement.tiles[step.tile];
  std::vector<Unit> units;
  for (const Part& part : step.parts) {
    const int64_t skip = part.first - part.unit->state;
    Unit unit = *part.unit;
    unit.first += skip;
    unit.state += skip;
    unit.count = part.count;
    unit.weight = part_of(part.unit->weight, skip, part.count);
    unit.sum = part_of(part.unit->sum, skip, part.count);
    unit.slots.clear();
    for (std::size_t a = 0; a < arrays_.size(); ++a) {
      const zr_dtype dtype = arrays_[a].dtype;
      char* memory = room(index) + place_in_tile(tile, a) + (part.first - tile.first) * size_of(dtype);
      const zr_view view{memory, part.count, dtype, 0, {1, 0}};
      if (plan_.has_master && a == 0)
        unit.master = view;
      else
        unit.slots.push_back(view);
    }
    units.push_back(std::move(unit));
  }
  return units;
}

void States::pass(const std::vector<Unit>& units, const std::vector<char>& touched,
                  const std::function<void(const std::vector<Unit>&)>& work) {
  if (rooms_.empty()) return;
  std::vector<Step> steps = steps_of(units, &touched);
  bool same = !steps_.empty() && started_ <= steps.size();
  for (std::size_t i = 0; same && i < started_; ++i) same = steps[i].tile == steps_[i].tile;
  if (same) {
    for (std::size_t i = 0; i < started_; ++i) steps[i].read = std::move(steps_[i].read);
  } else {
    steps_.clear();  // waits for what was read ahead
    started_ = 0;
    for (Transfer& behind : rooms_) wait(behind, waits_.write, "wait: write");
  }
  steps_ = std::move(steps);
  const std::size_t ahead = std::max<std::size_t>(rooms_.size() - 1, 1);
  while (started_ < std::min(steps_.size(), ahead)) start_read(started_++);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    const StateTile& tile = plan_.placement.tiles[step.tile];
    if (i >= started_) start_read(started_++);
    wait(step.read, waits_.read, "wait: read");
    work(units_in(step, i));
    rooms_[i % rooms_.size()] = store_of(tile).write(slot_of(tile), tile.at, room(i), tile.bytes, step.what);
    std::fill(written_[step.tile].begin(), written_[step.tile].end(), 1);
    if (started_ < steps_.size()) start_read(started_++);
  }
  steps_.clear();
  started_ = 0;
}

}  // namespace zr::host
