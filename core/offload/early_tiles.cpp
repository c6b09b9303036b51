#include "offload/early_tiles.hpp"

#include <algorithm>

#include "zr/error.hpp"

namespace zr::host::offload {

EarlyTiles::EarlyTiles(OptimizerStates& states, const std::vector<update::UpdateSlice>& slices)
    : states_(states),
      passes_(states.passes_of(slices, nullptr, {})),
      pass_of_tile_(states.plan_.placement.tiles.size(), kNone),
      buffers_(states.writes_.size()) {
  for (std::size_t i = 0; i < passes_.size(); ++i) pass_of_tile_[passes_[i].tile] = i;
}

std::vector<EarlyTiles::Tile> EarlyTiles::tiles() const {
  std::vector<Tile> tiles;
  for (const OptimizerStates::TilePass& pass : passes_) tiles.push_back({pass.tile, states_.slices_in(pass, 0)});
  return tiles;
}

void EarlyTiles::wait(Transfer& transfer, bool writes) const {
  const auto begin = std::chrono::steady_clock::now();
  transfer.wait();
  if (on_wait_) on_wait_(writes, begin);
}

std::size_t EarlyTiles::free_buffer() const {
  std::size_t found = kNone;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].tile != kNone) continue;
    if (states_.writes_[i].is_over()) return i;
    if (found == kNone) found = i;
  }
  return found;
}

void EarlyTiles::start_read(std::size_t buffer, std::size_t tile) {
  wait(states_.writes_[buffer], true);
  buffers_[buffer].read = states_.read_tile(tile, states_.tile_buffer(buffer), pass_of(tile).what);
  buffers_[buffer].tile = tile;
}

void EarlyTiles::begin() {
  states_.tile_passes_.clear();  // waits for what was read ahead
  states_.started_ = 0;
  for (Transfer& write : states_.writes_) wait(write, true);
}

bool EarlyTiles::read_ahead(std::size_t tile) {
  const auto is_free = [](const Buffer& buffer) { return buffer.tile == kNone; };
  if (std::ranges::any_of(buffers_, [&](const Buffer& buffer) { return buffer.tile == tile; })) return true;
  const std::size_t buffer = free_buffer();
  if (buffer == kNone || !states_.writes_[buffer].is_over() || std::ranges::count_if(buffers_, is_free) < 2)
    return false;
  start_read(buffer, tile);
  return true;
}

void EarlyTiles::update(std::size_t tile,
                        const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work) {
  const auto found = std::ranges::find_if(buffers_, [&](const Buffer& buffer) { return buffer.tile == tile; });
  std::size_t buffer = static_cast<std::size_t>(found - buffers_.begin());
  if (found == buffers_.end()) {
    buffer = free_buffer();  // exists: read_ahead() leaves one
    start_read(buffer, tile);
  }
  wait(buffers_[buffer].read, false);
  work(states_.slices_in(pass_of(tile), buffer));
  states_.write_tile(pass_of(tile), buffer);
  buffers_[buffer].tile = kNone;
}

void EarlyTiles::end() {
  for (Buffer& buffer : buffers_) {
    if (buffer.tile != kNone) try {
        wait(buffer.read, false);
      } catch (const Error&) {  // the tier keeps it: TierStore::failure()
      }
    buffer.read = Transfer();
    buffer.tile = kNone;
  }
}

}  // namespace zr::host::offload
