#include "offload/optimizer_states.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/round_up.hpp"
#include "base/text.hpp"

namespace zr::host::offload {

OptimizerStates::OptimizerStates(const plan::MemoryPlan& plan, Tiers& tiers, Ledger& ledger)
    : plan_(plan), tiers_(tiers), arrays_(plan.state_arrays()) {
  const auto kind = [&](std::size_t array) {
    return plan_.has_master && array == 0 ? MemoryKind::master : MemoryKind::optimizer;
  };
  allocations_.resize(plan.input.tiers.size());
  for (const plan::StateRange& at : plan.placement.states) {
    runs_.push_back({at, {}, {}, {}});
    Run& run = runs_.back();
    if (!in_memory(at.tier)) continue;
    for (std::size_t a = 0; a < arrays_.size(); ++a) {
      const int64_t bytes = at.count * size_of(arrays_[a].dtype);
      if (at.tier == 0) {
        run.owned.emplace_back(bytes, kPageBytes, ledger, Tier::device, kind(a), arrays_[a].name);
        run.memory.push_back(run.owned.back().data());
      } else {
        TierStore& tier = *tiers_[static_cast<std::size_t>(at.tier)];
        run.allocations.emplace_back(tier, bytes,
                                     std::vector<TierStore::LedgerEntry>{{kind(a), arrays_[a].name, bytes}});
        run.memory.push_back(tier.map(run.allocations.back().id()));
        std::memset(run.memory.back(), 0, static_cast<std::size_t>(bytes));
      }
    }
  }
  const std::vector<plan::StateTile>& tiles = plan.placement.tiles;
  written_.assign(tiles.size(), std::vector<char>(arrays_.size(), 0));
  if (tiles.empty()) return;
  for (std::size_t tier = 1; tier < tiers_.size(); ++tier) {
    int64_t bytes = 0, elements = 0;
    for (const plan::StateTile& tile : tiles) {
      if (tile.tier != static_cast<int>(tier)) continue;
      bytes = tile.at + tile.bytes;
      elements += tile.count;
    }
    std::vector<TierStore::LedgerEntry> held;
    for (std::size_t a = 0; a < arrays_.size(); ++a)
      held.push_back({kind(a), arrays_[a].name, elements * size_of(arrays_[a].dtype)});
    if (bytes > 0) allocations_[tier] = TierAllocation(*tiers_[tier], bytes, std::move(held));
  }
  std::vector<TierStore*> disks;
  int64_t align = kPageBytes;
  for (const auto& tier : tiers_) {
    if (!tier || tier->info().in_memory()) continue;
    disks.push_back(tier.get());
    align = std::max(align, tier->info().align);
  }
  staging_ = TrackedMemory(plan.staging_bytes(), align, ledger, Tier::host, MemoryKind::staging, "states in flight");
  registered_ = RegisteredMemory(staging_.data(), staging_.bytes(), std::move(disks));
  writes_.resize(static_cast<std::size_t>(std::min(plan::kTilesInFlight, std::ssize(tiles))));
}

std::vector<plan::StateRange> OptimizerStates::runs(int64_t first, int64_t count) const {
  std::vector<plan::StateRange> runs;
  for (const Run& run : runs_) {
    const int64_t begin = std::max(first, run.at.first), end = std::min(first + count, run.at.first + run.at.count);
    if (begin < end) runs.push_back({run.at.tier, begin, end - begin});
  }
  return runs;
}

const OptimizerStates::Run& OptimizerStates::run_of(int64_t element) const {
  for (const Run& run : runs_)
    if (run.at.first <= element && element < run.at.first + run.at.count) return run;
  fail_internal("no tier holds optimizer state element " + std::to_string(element));
}

zr_view OptimizerStates::view(std::size_t array, int64_t first, int64_t count) const {
  const Run& run = run_of(first);
  const zr_dtype dtype = arrays_[array].dtype;
  if (run.memory.empty()) return {nullptr, count, dtype, 0, {1, 0}};
  return {static_cast<char*>(run.memory[array]) + (first - run.at.first) * size_of(dtype), count, dtype, 0, {1, 0}};
}

int64_t OptimizerStates::offset_in_tile(const plan::StateTile& tile, std::size_t array) const {
  int64_t at = 0;
  for (std::size_t a = 0; a < array; ++a)
    at +=
        round_up(tile.count * size_of(arrays_[a].dtype), plan_.input.tiers[static_cast<std::size_t>(tile.tier)].align);
  return at;
}

void OptimizerStates::wait(Transfer& transfer, double& seconds, const char* what) {
  const auto begin = std::chrono::steady_clock::now();
  transfer.wait();
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (on_wait_) on_wait_(what, begin);
}

void OptimizerStates::visit(std::size_t array, int64_t first, int64_t count, Access use, const std::string& what,
                            const std::function<void(void*, int64_t, int64_t)>& fn) {
  const std::vector<plan::StateTile>& tiles = plan_.placement.tiles;
  for (const plan::StateRange& run : runs(first, count)) {
    if (in_memory(run.tier)) {
      fn(view(array, run.first, run.count).data, run.first, run.count);
      continue;
    }
    auto tile = std::upper_bound(tiles.begin(), tiles.end(), run.first,
                                 [](int64_t element, const plan::StateTile& t) { return element < t.first; }) -
                tiles.begin() - 1;
    for (int64_t at = run.first; at < run.first + run.count; ++tile) {
      const plan::StateTile& one = tiles[static_cast<std::size_t>(tile)];
      const int64_t n = std::min(run.first + run.count, one.first + one.count) - at;
      visit_tile(static_cast<std::size_t>(tile), array, at, n, use, what, fn);
      at += n;
    }
  }
}

// Uses the first staging buffer, after all transfers of a pass. Transfers move full blocks, so a partial block is read
// before it is written.
void OptimizerStates::visit_tile(std::size_t index, std::size_t array, int64_t first, int64_t count, Access use,
                                 const std::string& what, const std::function<void(void*, int64_t, int64_t)>& fn) {
  steps_.clear();  // the next pass reads again what was read ahead
  started_ = 0;
  for (Transfer& transfer : writes_) transfer.wait();
  const plan::StateTile& tile = plan_.placement.tiles[index];
  TierStore& store = store_of(tile);
  const int64_t size = size_of(arrays_[array].dtype), align = store.info().align;
  const int64_t from = (first - tile.first) * size, to = from + count * size;
  int64_t begin = from / align * align, end = round_up(to, align);
  const int64_t at = tile.at + offset_in_tile(tile, array);
  char* const staging = staging_.data();
  char& was_written = written_[index][array];
  if (!was_written) {
    if (use != Access::read) {
      begin = 0;
      end = round_up(tile.count * size, align);
    }
    std::memset(staging, 0, static_cast<std::size_t>(end - begin));
  } else if (use != Access::write || begin != from || end != to) {
    Transfer reading = store.read(allocation_of(tile), at + begin, staging, end - begin, what);
    reading.wait();
  }
  fn(staging + (from - begin), first, count);
  if (use == Access::read) return;
  Transfer writing = store.write(allocation_of(tile), at + begin, staging, end - begin, what);
  writing.wait();
  was_written = 1;
}

std::string OptimizerStates::name_of(const std::vector<Part>& parts) const {
  const auto name = [&](const Part& part) { return "'" + plan_.input.parameters[part.slice->param].name + "'"; };
  std::string text = "states of " + name(parts.front());
  if (parts.front().slice->param != parts.back().slice->param) text += " to " + name(parts.back());
  return text;
}

void OptimizerStates::start_read(std::size_t index) {
  Step& step = steps_[index];
  const plan::StateTile& tile = plan_.placement.tiles[step.tile];
  Transfer& behind = writes_[index % writes_.size()];
  wait(behind, waits_.write, "wait: write");
  const std::vector<char>& written = written_[step.tile];
  if (std::find(written.begin(), written.end(), 0) == written.end()) {
    step.read = store_of(tile).read(allocation_of(tile), tile.at, tile_buffer(index), tile.bytes, step.what);
    return;
  }
  std::memset(tile_buffer(index), 0, static_cast<std::size_t>(tile.bytes));
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    if (!written[a]) continue;
    const int64_t at = offset_in_tile(tile, a),
                  bytes = round_up(tile.count * size_of(arrays_[a].dtype), store_of(tile).info().align);
    step.read = store_of(tile).read(allocation_of(tile), tile.at + at, tile_buffer(index) + at, bytes, step.what);
    step.read.wait();  // only in the first pass
  }
}

std::vector<OptimizerStates::Step> OptimizerStates::steps_of(const std::vector<update::UpdateSlice>& slices,
                                                             const std::vector<char>* touched) const {
  std::vector<Step> steps;
  const std::vector<plan::StateTile>& tiles = plan_.placement.tiles;
  std::size_t next = 0;  // the first slice that overlaps the tile
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    Step step{t, {}, "", {}};
    const int64_t begin = tiles[t].first, end = begin + tiles[t].count;
    bool wanted = false;
    while (next < slices.size() && slices[next].state + slices[next].count <= begin) ++next;
    for (std::size_t u = next; u < slices.size() && slices[u].state < end; ++u) {
      const int64_t first = std::max(begin, slices[u].state), last = std::min(end, slices[u].state + slices[u].count);
      step.parts.push_back({&slices[u], first, last - first});
      wanted |= !touched || (*touched)[slices[u].param];
    }
    if (!wanted) continue;
    step.what = name_of(step.parts);
    steps.push_back(std::move(step));
  }
  return steps;
}

void OptimizerStates::read_ahead(const std::vector<update::UpdateSlice>& slices) {
  if (writes_.empty()) return;
  for (Transfer& behind : writes_) wait(behind, waits_.write, "wait: write");  // tiles may change staging buffers
  steps_ = steps_of(slices, nullptr);
  const std::size_t ahead = std::max<std::size_t>(writes_.size() - 1, 1);
  for (started_ = 0; started_ < std::min(steps_.size(), ahead); ++started_) start_read(started_);
}

// The slices of a tile, with their states in the staging buffer.
std::vector<update::UpdateSlice> OptimizerStates::slices_in(const Step& step, std::size_t index) const {
  const plan::StateTile& tile = plan_.placement.tiles[step.tile];
  std::vector<update::UpdateSlice> slices;
  for (const Part& part : step.parts) {
    const int64_t skip = part.first - part.slice->state;
    update::UpdateSlice slice = *part.slice;
    slice.first += skip;
    slice.state += skip;
    slice.count = part.count;
    slice.weight = part_of(part.slice->weight, skip, part.count);
    slice.grad = part_of(part.slice->grad, skip, part.count);
    slice.slots.clear();
    for (std::size_t a = 0; a < arrays_.size(); ++a) {
      const zr_dtype dtype = arrays_[a].dtype;
      char* memory = tile_buffer(index) + offset_in_tile(tile, a) + (part.first - tile.first) * size_of(dtype);
      const zr_view view{memory, part.count, dtype, 0, {1, 0}};
      if (plan_.has_master && a == 0)
        slice.master = view;
      else
        slice.slots.push_back(view);
    }
    slices.push_back(std::move(slice));
  }
  return slices;
}

void OptimizerStates::pass(const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched,
                           const std::function<void(const std::vector<update::UpdateSlice>&)>& work) {
  if (writes_.empty()) return;
  std::vector<Step> steps = steps_of(slices, &touched);
  bool same = !steps_.empty() && started_ <= steps.size();
  for (std::size_t i = 0; same && i < started_; ++i) same = steps[i].tile == steps_[i].tile;
  if (same) {
    for (std::size_t i = 0; i < started_; ++i) steps[i].read = std::move(steps_[i].read);
  } else {
    steps_.clear();  // waits for reads ahead
    started_ = 0;
    for (Transfer& behind : writes_) wait(behind, waits_.write, "wait: write");
  }
  steps_ = std::move(steps);
  const std::size_t ahead = std::max<std::size_t>(writes_.size() - 1, 1);
  while (started_ < std::min(steps_.size(), ahead)) start_read(started_++);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    const plan::StateTile& tile = plan_.placement.tiles[step.tile];
    if (i >= started_) start_read(started_++);
    wait(step.read, waits_.read, "wait: read");
    work(slices_in(step, i));
    writes_[i % writes_.size()] =
        store_of(tile).write(allocation_of(tile), tile.at, tile_buffer(i), tile.bytes, step.what);
    std::fill(written_[step.tile].begin(), written_[step.tile].end(), 1);
    if (started_ < steps_.size()) start_read(started_++);
  }
  steps_.clear();
  started_ = 0;
}

}  // namespace zr::host::offload
