// The host's own ways to what stands in pages: parts of it, and the update.
#include <algorithm>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "offload/pages.hpp"

namespace zr::host {

std::string Pages::name_of(const char* what, const Unit& unit) const {
  return std::string(what) + " of '" + plan_.input.parameters[unit.param].name + "'";
}

void Pages::visit(const zr_view& view, States::Use use, const std::string& what,
                  const std::function<void(void*, int64_t, int64_t)>& fn) {
  if (view.count == 0) return;
  const std::lock_guard lock(mutex_);
  if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  const Range whole = range_of(view);
  const int64_t size = size_of(view.dtype), leaf = kLeaf * size, block = whole.buffer->block();
  const int64_t most = (paging_.chunk_bytes() - 2 * block) / leaf * leaf;
  for (int64_t at = whole.from; at < whole.to;) {
    Range part = whole;
    part.from = at;
    part.to = std::min(whole.to, at + most);
    if (use != States::Use::read && part.to < whole.to) part.to = part.to / block * block;
    part.room = chunks_.data();
    part.what = what;
    if (use != States::Use::write) {
      read(part);
      wait(part, waits_.read);
    }
    fn(part.data(), (at - whole.from) / size, (part.to - at) / size);
    if (use != States::Use::read) {
      drop_ahead(part);
      part.buffer->prepare_write(part.from, part.to, what);
      part.move = part.buffer->write(part.from, part.to, part.room, what);
      wait(part, waits_.write);
    }
    at = part.to;
  }
}

// Takes as much of `rest` as there is room for: all of it behind others, else what fits. False: nothing does.
bool Pages::fill(Chunk& chunk, Unit& rest) const {
  const auto used = [](const std::vector<Range>& ranges) {
    int64_t bytes = 0;
    for (const Range& range : ranges) bytes += range.room_bytes();
    return bytes;
  };
  Range sums = range_of(rest.sum), weights = range_of(rest.weight);
  const int64_t sum_size = size_of(rest.sum.dtype), weight_size = size_of(rest.weight.dtype);
  int64_t count = rest.count;
  const auto limit = [&](const Range& range, int64_t room, int64_t size) {
    if (!range.buffer || range.room_bytes() <= room) return;
    const int64_t end = range.buffer->lo(range.buffer->lo(range.from) + room);
    count = std::min(count, (end - range.from) / size);
  };
  limit(sums, paging_.chunk_sums - used(chunk.sums), sum_size);
  limit(weights, paging_.chunk_weights - used(chunk.weights), weight_size);
  if (count < rest.count) {
    if (!chunk.units.empty()) return false;
    if (weights.buffer) count = (weights.buffer->lo(weights.from + count * weight_size) - weights.from) / weight_size;
    if (count <= 0 || !plan_.input.wanted.elementwise) fail_bug("a chunk of pages is smaller than what it must hold");
  }
  Unit unit = rest;
  unit.count = count;
  unit.sum = part_of(rest.sum, 0, count);
  unit.weight = part_of(rest.weight, 0, count);
  const auto cut = [&](zr_view& view) {  // what fits of a view, and the rest of it
    const zr_view whole = view;
    if (whole.count == 0) return whole;
    view = part_of(whole, count, whole.count - count);
    return part_of(whole, 0, count);
  };
  unit.master = cut(rest.master);
  for (std::size_t i = 0; i < rest.slots.size(); ++i) unit.slots[i] = cut(rest.slots[i]);
  rest.sum = part_of(rest.sum, count, rest.count - count);
  rest.weight = part_of(rest.weight, count, rest.count - count);
  rest.first += count;
  rest.state += count;
  rest.count -= count;
  if (sums.buffer) chunk.sums.push_back(range_of(unit.sum));
  if (weights.buffer) chunk.weights.push_back(range_of(unit.weight));
  chunk.units.push_back(std::move(unit));
  return true;
}

// Begins to read a chunk, and points its units to where it will be.
void Pages::begin(Chunk& chunk, char* room) {
  char *sums = room, *weights = room + paging_.chunk_sums;
  std::size_t next_sum = 0, next_weight = 0;
  for (Unit& unit : chunk.units) {
    if (find(unit.sum.data)) {
      Range& range = chunk.sums[next_sum++];
      range.room = sums;
      sums += range.room_bytes();
      range.what = name_of("gradient sums", unit);
      read(range);
      unit.sum.data = range.data();
    }
    if (find(unit.weight.data)) {
      Range& range = chunk.weights[next_weight++];
      range.room = weights;
      weights += range.room_bytes();
      range.what = name_of("weights", unit);
      range.buffer->prepare_write(range.from, range.to, range.what);
      if (!plan_.has_master) read(range);  // they are their own master
      unit.weight.data = range.data();
    }
  }
}

void Pages::update(const std::vector<Unit>& units, const std::vector<char>& touched,
                   const std::function<void(const std::vector<Unit>&)>& work) {
  const std::lock_guard lock(mutex_);
  if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  while (!ahead_.empty()) drop_ahead(ahead_.begin());
  std::vector<Unit> in_memory;
  std::vector<Chunk> chunks(1);
  for (const Unit& unit : units) {
    if (!touched[unit.param]) continue;
    if (!find(unit.sum.data) && !find(unit.weight.data)) {
      in_memory.push_back(unit);
      continue;
    }
    for (Unit rest = unit; rest.count > 0;)
      if (!fill(chunks.back(), rest)) chunks.emplace_back();
  }
  if (!in_memory.empty()) work(in_memory);
  if (chunks.back().units.empty()) return;
  const auto settle = [&](std::vector<Range>& ranges, double& seconds) {
    for (const Range& range : ranges)
      if (range.move) wait(range, seconds);
  };
  const int64_t room = paging_.chunk_sums + paging_.chunk_weights;
  const auto start = [&](std::size_t i) {
    if (i >= kChunksUnderWay) settle(chunks[i - kChunksUnderWay].weights, waits_.write);
    begin(chunks[i], chunks_.data() + static_cast<int64_t>(i % kChunksUnderWay) * room);
  };
  start(0);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Chunk& chunk = chunks[i];
    if (i + 1 < chunks.size()) start(i + 1);
    settle(chunk.sums, waits_.read);
    settle(chunk.weights, waits_.read);
    work(chunk.units);
    for (Range& range : chunk.weights) range.move = range.buffer->write(range.from, range.to, range.room, range.what);
  }
  for (Chunk& chunk : chunks) settle(chunk.weights, waits_.write);
}

}  // namespace zr::host
