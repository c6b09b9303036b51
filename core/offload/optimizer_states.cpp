#include "offload/optimizer_states.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/round_up.hpp"

namespace zr::host::offload {

OptimizerStates::OptimizerStates(const plan::MemoryPlan& plan, Tiers& tiers, Ledger& ledger, DeviceMemory* device)
    : plan_(plan), tiers_(tiers), device_(device), arrays_(plan.rank_plan.state_arrays) {
  allocations_.resize(plan.input.tiers.size());
  for (const plan::StateRange& range : plan.placement.states) {
    RangeMemory& memory = ranges_.emplace_back(RangeMemory{range, {}, {}, {}});
    if (in_memory(range.tier)) allocate_memory(memory, ledger);
  }
  const std::vector<plan::StateTile>& tiles = plan.placement.tiles;
  written_.assign(tiles.size(), std::vector<char>(arrays_.size(), 0));
  if (tiles.empty()) return;
  for (std::size_t tier = 1; tier < tiers_.size(); ++tier) allocations_[tier] = reserve_tiles(tier);
  allocate_staging(ledger);
}

MemoryKind OptimizerStates::kind_of(std::size_t array) const {
  return plan_.has_master && array == 0 ? MemoryKind::master : MemoryKind::optimizer;
}

// Allocates all arrays of a range on the device or on a tier in memory.
void OptimizerStates::allocate_memory(RangeMemory& memory, Ledger& ledger) {
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    const int64_t bytes =
        plan_.array_range(a, memory.range.first, memory.range.count).count * size_of(arrays_[a].dtype);
    if (memory.range.tier == 0) {
      if (device_)
        memory.owned.emplace_back(bytes, *device_, ledger, kind_of(a), arrays_[a].name);
      else
        memory.owned.emplace_back(bytes, kPageBytes, ledger, Tier::device, kind_of(a), arrays_[a].name);
      memory.addresses.push_back(memory.owned.back().data());
    } else if (bytes == 0) {
      memory.allocations.emplace_back();
      memory.addresses.push_back(nullptr);
    } else {
      TierStore& tier = *tiers_[static_cast<std::size_t>(memory.range.tier)];
      memory.allocations.emplace_back(tier, bytes,
                                      std::vector<TierStore::LedgerEntry>{{kind_of(a), arrays_[a].name, bytes}});
      memory.addresses.push_back(tier.map(memory.allocations.back().id()));
      std::memset(memory.addresses.back(), 0, static_cast<std::size_t>(bytes));
    }
  }
}

// Reserves disk space for the tiles of a tier, if it has any.
TierAllocation OptimizerStates::reserve_tiles(std::size_t tier) {
  int64_t bytes = 0;
  std::vector<TierStore::LedgerEntry> held;
  for (std::size_t a = 0; a < arrays_.size(); ++a) held.push_back({kind_of(a), arrays_[a].name, 0});
  for (const plan::StateTile& tile : plan_.placement.tiles) {
    if (tile.tier != static_cast<int>(tier)) continue;
    bytes = tile.offset + tile.bytes;
    for (std::size_t a = 0; a < arrays_.size(); ++a)
      held[a].bytes += plan_.array_range(a, tile.first, tile.count).count * size_of(arrays_[a].dtype);
  }
  return bytes > 0 ? TierAllocation(*tiers_[tier], bytes, std::move(held)) : TierAllocation();
}

// Allocates the staging memory for tiles, aligned for all disks, and registers it with them.
void OptimizerStates::allocate_staging(Ledger& ledger) {
  std::vector<TierStore*> disks;
  int64_t align = kPageBytes;
  for (const auto& tier : tiers_) {
    if (!tier || tier->info().in_memory()) continue;
    disks.push_back(tier.get());
    align = std::max(align, tier->info().align);
  }
  staging_ = TrackedMemory(plan_.staging_bytes(), align, ledger, Tier::host, MemoryKind::staging, "states in flight");
  registered_ = RegisteredMemory(staging_.data(), staging_.bytes(), std::move(disks));
  writes_.resize(static_cast<std::size_t>(std::min(plan::kTilesInFlight, std::ssize(plan_.placement.tiles))));
}

std::vector<plan::StateRange> OptimizerStates::ranges(int64_t first, int64_t count) const {
  std::vector<plan::StateRange> ranges;
  for (const RangeMemory& memory : ranges_) {
    const int64_t begin = std::max(first, memory.range.first),
                  end = std::min(first + count, memory.range.first + memory.range.count);
    if (begin < end) ranges.push_back({memory.range.tier, begin, end - begin});
  }
  return ranges;
}

const OptimizerStates::RangeMemory& OptimizerStates::memory_of(int64_t element) const {
  for (const RangeMemory& memory : ranges_)
    if (memory.range.first <= element && element < memory.range.first + memory.range.count) return memory;
  fail_internal(fmt::format("no tier holds optimizer state element {}", element));
}

zr_view OptimizerStates::view(std::size_t array, int64_t first, int64_t count) const {
  const RangeMemory& memory = memory_of(first);
  const zr_dtype dtype = arrays_[array].dtype;
  const plan::ArrayRange part = plan_.array_part(array, first, count);
  if (memory.addresses.empty()) return {nullptr, part.count, dtype, 0, kHostMemory};
  const int64_t begin = plan_.array_range(array, memory.range.first, 0).first;
  return {static_cast<char*>(memory.addresses[array]) + (part.first - begin) * size_of(dtype), part.count, dtype, 0,
          memory.range.tier == 0 && device_ ? device_->device() : kHostMemory};
}

int64_t OptimizerStates::bytes_in_tile(const plan::StateTile& tile, std::size_t array) const {
  return round_up(plan_.array_range(array, tile.first, tile.count).count * size_of(arrays_[array].dtype),
                  plan_.input.tiers[static_cast<std::size_t>(tile.tier)].align);
}

int64_t OptimizerStates::offset_in_tile(const plan::StateTile& tile, std::size_t array) const {
  int64_t at = 0;
  for (std::size_t a = 0; a < array; ++a) at += bytes_in_tile(tile, a);
  return at;
}

void OptimizerStates::wait(Transfer& transfer, double& seconds, const char* what) {
  const auto begin = std::chrono::steady_clock::now();
  transfer.wait();
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (on_wait_) on_wait_(what, begin);
}

void OptimizerStates::visit(std::size_t array, int64_t first, int64_t count, Access access, const std::string& what,
                            const std::function<void(void*, int64_t, int64_t)>& fn) {
  const std::vector<plan::StateTile>& tiles = plan_.placement.tiles;
  for (const plan::StateRange& range : ranges(first, count)) {
    if (in_memory(range.tier)) {
      const zr_view states = view(array, range.first, range.count);
      if (range.tier == 0 && device_)
        visit_on_device(states, range, access, fn);
      else
        fn(states.data, range.first, range.count);
      continue;
    }
    auto tile = std::upper_bound(tiles.begin(), tiles.end(), range.first,
                                 [](int64_t element, const plan::StateTile& t) { return element < t.first; }) -
                tiles.begin() - 1;
    for (int64_t at = range.first; at < range.first + range.count; ++tile) {
      const plan::StateTile& found = tiles[static_cast<std::size_t>(tile)];
      const int64_t n = std::min(range.first + range.count, found.first + found.count) - at;
      visit_tile(static_cast<std::size_t>(tile), array, at, n, access, what, fn);
      at += n;
    }
  }
}

// In one call: the caller knows where the parameter may be cut.
void OptimizerStates::visit_on_device(const zr_view& states, const plan::StateRange& range, Access access,
                                      const std::function<void(void*, int64_t, int64_t)>& fn) {
  std::vector<char> copy(static_cast<std::size_t>(states.count * size_of(states.dtype)));
  if (access != Access::write) device_->download(states.data, copy.data(), std::ssize(copy));
  fn(copy.data(), range.first, range.count);
  if (access != Access::read) device_->upload(copy.data(), states.data, std::ssize(copy));
}

// Uses the first staging buffer, after all transfers of a pass over the tiles. Transfers move full blocks, so a partial
// block is read before it is written.
void OptimizerStates::visit_tile(std::size_t index, std::size_t array, int64_t first, int64_t count, Access access,
                                 const std::string& what, const std::function<void(void*, int64_t, int64_t)>& fn) {
  tile_passes_.clear();  // the next pass reads again what was read ahead
  started_ = 0;
  for (Transfer& transfer : writes_) transfer.wait();
  const plan::StateTile& tile = plan_.placement.tiles[index];
  TierStore& store = store_of(tile);
  const int64_t size = size_of(arrays_[array].dtype), align = store.info().align;
  const plan::ArrayRange part = plan_.array_part(array, first, count);
  const int64_t from = (part.first - plan_.array_range(array, tile.first, 0).first) * size,
                to = from + part.count * size;
  int64_t begin = from / align * align, end = round_up(to, align);
  const int64_t at = tile.offset + offset_in_tile(tile, array);
  char* const staging = staging_.data();
  char& was_written = written_[index][array];
  if (!was_written) {
    if (access != Access::read) {
      begin = 0;
      end = bytes_in_tile(tile, array);
    }
    std::memset(staging, 0, static_cast<std::size_t>(end - begin));
  } else if (access != Access::write || begin != from || end != to) {
    Transfer reading = store.read(allocation_of(tile), at + begin, staging, end - begin, what);
    reading.wait();
  }
  fn(staging + (from - begin), first, count);
  if (access == Access::read) return;
  Transfer writing = store.write(allocation_of(tile), at + begin, staging, end - begin, what);
  writing.wait();
  was_written = 1;
}

std::string OptimizerStates::name_of(const std::vector<SlicePart>& parts) const {
  const auto name = [&](const SlicePart& part) { return plan_.input.parameters[part.slice->param].name; };
  if (parts.front().slice->param == parts.back().slice->param)
    return fmt::format("states of '{}'", name(parts.front()));
  return fmt::format("states of '{}' to '{}'", name(parts.front()), name(parts.back()));
}

void OptimizerStates::start_read(std::size_t index) {
  TilePass& pass = tile_passes_[index];
  wait(writes_[index % writes_.size()], waits_.write, "wait: write");
  pass.read = read_tile(pass.tile, tile_buffer(index), pass.what);
}

Transfer OptimizerStates::read_tile(std::size_t index, char* buffer, const std::string& what) {
  const plan::StateTile& tile = plan_.placement.tiles[index];
  const std::vector<char>& written = written_[index];
  if (std::find(written.begin(), written.end(), 0) == written.end())
    return store_of(tile).read(allocation_of(tile), tile.offset, buffer, tile.bytes, what);
  std::memset(buffer, 0, static_cast<std::size_t>(tile.bytes));
  for (std::size_t a = 0; a < arrays_.size(); ++a) {
    if (!written[a]) continue;
    const int64_t at = offset_in_tile(tile, a), bytes = bytes_in_tile(tile, a);
    if (bytes == 0) continue;
    Transfer read = store_of(tile).read(allocation_of(tile), tile.offset + at, buffer + at, bytes, what);
    read.wait();  // only in the first pass
  }
  return {};
}

void OptimizerStates::write_tile(const TilePass& pass, std::size_t index) {
  const plan::StateTile& tile = plan_.placement.tiles[pass.tile];
  writes_[index % writes_.size()] =
      store_of(tile).write(allocation_of(tile), tile.offset, tile_buffer(index), tile.bytes, pass.what);
  std::fill(written_[pass.tile].begin(), written_[pass.tile].end(), 1);
}

std::vector<OptimizerStates::TilePass> OptimizerStates::passes_of(const std::vector<update::UpdateSlice>& slices,
                                                                  const std::vector<char>* touched,
                                                                  const std::vector<char>& skipped) const {
  std::vector<TilePass> passes;
  const std::vector<plan::StateTile>& tiles = plan_.placement.tiles;
  std::size_t next = 0;  // the first slice that overlaps the tile
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    TilePass pass{t, {}, "", {}};
    const int64_t begin = tiles[t].first, end = begin + tiles[t].count;
    bool touches = false;
    while (next < slices.size() && slices[next].state_offset + slices[next].count <= begin) ++next;
    for (std::size_t u = next; u < slices.size() && slices[u].state_offset < end; ++u) {
      const int64_t first = std::max(begin, slices[u].state_offset),
                    last = std::min(end, slices[u].state_offset + slices[u].count);
      pass.parts.push_back({&slices[u], first, last - first});
      touches |= !touched || (*touched)[slices[u].param];
    }
    if (!touches || (!skipped.empty() && skipped[t])) continue;
    pass.what = name_of(pass.parts);
    passes.push_back(std::move(pass));
  }
  return passes;
}

void OptimizerStates::read_ahead(const std::vector<update::UpdateSlice>& slices) {
  if (writes_.empty()) return;
  for (Transfer& write : writes_) wait(write, waits_.write, "wait: write");  // tiles may change staging buffers
  tile_passes_ = passes_of(slices, nullptr, {});
  const std::size_t ahead = std::max<std::size_t>(writes_.size() - 1, 1);
  for (started_ = 0; started_ < std::min(tile_passes_.size(), ahead); ++started_) start_read(started_);
}

// The slices of a tile, with their states in the staging buffer.
std::vector<update::UpdateSlice> OptimizerStates::slices_in(const TilePass& pass, std::size_t index) const {
  const plan::StateTile& tile = plan_.placement.tiles[pass.tile];
  std::vector<update::UpdateSlice> slices;
  for (const SlicePart& part : pass.parts) {
    const int64_t skip = part.first - part.slice->state_offset;
    update::UpdateSlice slice = *part.slice;
    slice.first += skip;
    slice.state_offset += skip;
    slice.count = part.count;
    slice.weight = part_of(part.slice->weight, skip, part.count);
    slice.grad = part_of(part.slice->grad, skip, part.count);
    if (plan_.has_master_of(slice.param)) slice.master = view_in_tile(index, tile, 0, part.first, part.count);
    for (std::size_t i = 0; i < slice.slots.size(); ++i)
      slice.slots[i] = view_in_tile(index, tile, plan_.array_of(slice.param, i), part.first, part.count);
    slices.push_back(std::move(slice));
  }
  return slices;
}

zr_view OptimizerStates::view_in_tile(std::size_t index, const plan::StateTile& tile, std::size_t array, int64_t first,
                                      int64_t count) const {
  const plan::ArrayRange part = plan_.array_part(array, first, count);
  const int64_t skip = part.first - plan_.array_range(array, tile.first, 0).first;
  const zr_dtype dtype = arrays_[array].dtype;
  return {tile_buffer(index) + offset_in_tile(tile, array) + skip * size_of(dtype), part.count, dtype, 0, {1, 0}};
}

void OptimizerStates::for_each_slice_in_memory(
    const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched, const std::vector<char>& skipped,
    const std::function<void(const std::vector<update::UpdateSlice>&)>& work) {
  if (writes_.empty()) return;
  std::vector<TilePass> passes = passes_of(slices, &touched, skipped);
  if (passes.empty()) {  // all were updated during backward: their writes may go on
    tile_passes_.clear();
    started_ = 0;
    return;
  }
  bool same = !tile_passes_.empty() && started_ <= passes.size();
  for (std::size_t i = 0; same && i < started_; ++i) same = passes[i].tile == tile_passes_[i].tile;
  if (same) {
    for (std::size_t i = 0; i < started_; ++i) passes[i].read = std::move(tile_passes_[i].read);
  } else {
    tile_passes_.clear();  // waits for reads ahead
    started_ = 0;
    for (Transfer& write : writes_) wait(write, waits_.write, "wait: write");
  }
  tile_passes_ = std::move(passes);
  const std::size_t ahead = std::max<std::size_t>(writes_.size() - 1, 1);
  while (started_ < std::min(tile_passes_.size(), ahead)) start_read(started_++);
  for (std::size_t i = 0; i < tile_passes_.size(); ++i) {
    TilePass& pass = tile_passes_[i];
    if (i >= started_) start_read(started_++);
    wait(pass.read, waits_.read, "wait: read");
    work(slices_in(pass, i));
    write_tile(pass, i);
    if (started_ < tile_passes_.size()) start_read(started_++);
  }
  tile_passes_.clear();
  started_ = 0;
}

}  // namespace zr::host::offload
