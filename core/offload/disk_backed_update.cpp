// DiskBackedBuffers: access by the engine (visit()) and the update.
#include <fmt/format.h>

#include <algorithm>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "offload/disk_backed_buffers.hpp"

namespace zr::host::offload {

std::string DiskBackedBuffers::name_of(const char* what, const update::UpdateSlice& slice) const {
  return fmt::format("{} of '{}'", what, plan_.input.parameters[slice.param].name);
}

void DiskBackedBuffers::visit(const zr_view& view, OptimizerStates::Access access, const std::string& what,
                              const std::function<void(void*, int64_t, int64_t)>& fn) {
  if (view.count == 0) return;
  const MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  const BufferRange range = range_of(view);
  const int64_t size = size_of(view.dtype), norm_block = plan::kNormBlock * size, block = range.buffer->block();
  const int64_t max_bytes = (disk_staging_.chunk_bytes() - 2 * block) / norm_block * norm_block;
  for (int64_t at = range.from; at < range.to;) {
    BufferRange part = range;
    part.from = at;
    part.to = std::min(range.to, at + max_bytes);
    if (access != OptimizerStates::Access::read && part.to < range.to) part.to = part.to / block * block;
    part.staging = chunks_.data();
    part.what = what;
    if (access != OptimizerStates::Access::write) {
      read(part);
      wait(part, waits_.read);
    }
    fn(part.data(), (at - range.from) / size, (part.to - at) / size);
    if (access != OptimizerStates::Access::read) {
      discard_prefetched(part);
      part.buffer->prepare_write(part.from, part.to, what);
      part.transfer = part.buffer->write(part.from, part.to, part.staging, what);
      wait(part, waits_.write);
    }
    at = part.to;
  }
}

// Moves elements from `rest` to the chunk: as many as fit if the chunk is empty, otherwise all or none. Returns false
// if it moves none.
bool DiskBackedBuffers::fill(Chunk& chunk, update::UpdateSlice& rest) const {
  const auto used = [](const std::vector<BufferRange>& ranges) {
    int64_t bytes = 0;
    for (const BufferRange& range : ranges) bytes += range.staging_bytes();
    return bytes;
  };
  BufferRange gradients = range_of(rest.grad), weights = range_of(rest.weight);
  const int64_t gradient_size = size_of(rest.grad.dtype), weight_size = size_of(rest.weight.dtype);
  int64_t count = rest.count;
  const auto limit = [&](const BufferRange& range, int64_t staging, int64_t size) {
    if (!range.buffer || range.staging_bytes() <= staging) return;
    const int64_t end = range.buffer->block_begin(range.buffer->block_begin(range.from) + staging);
    count = std::min(count, (end - range.from) / size);
  };
  limit(gradients, disk_staging_.chunk_gradients - used(chunk.reduced_gradients), gradient_size);
  limit(weights, disk_staging_.chunk_weights - used(chunk.weights), weight_size);
  if (count < rest.count) {
    if (!chunk.slices.empty()) return false;
    if (weights.buffer)
      count = (weights.buffer->block_begin(weights.from + count * weight_size) - weights.from) / weight_size;
    if (count <= 0 || !plan_.input.elementwise()) fail_internal("a staging chunk is too small for an update slice");
  }
  update::UpdateSlice slice = rest;
  slice.count = count;
  slice.grad = part_of(rest.grad, 0, count);
  slice.weight = part_of(rest.weight, 0, count);
  const bool takes_all = count == rest.count;  // always, unless the states are elementwise
  const auto cut = [&](zr_view& view) {        // returns the first `count` elements and leaves the rest in `view`
    const zr_view full = view;
    if (full.count == 0 || takes_all) return full;
    view = part_of(full, count, full.count - count);
    return part_of(full, 0, count);
  };
  slice.master = cut(rest.master);
  for (std::size_t i = 0; i < rest.slots.size(); ++i) slice.slots[i] = cut(rest.slots[i]);
  rest.grad = part_of(rest.grad, count, rest.count - count);
  rest.weight = part_of(rest.weight, count, rest.count - count);
  rest.first += count;
  rest.state_offset += count;
  rest.count -= count;
  if (gradients.buffer) chunk.reduced_gradients.push_back(range_of(slice.grad));
  if (weights.buffer) chunk.weights.push_back(range_of(slice.weight));
  chunk.slices.push_back(std::move(slice));
  return true;
}

// Starts to read a chunk, and points its slices to the staging memory.
void DiskBackedBuffers::start_reads(Chunk& chunk, char* staging) {
  char *gradients = staging, *weights = staging + disk_staging_.chunk_gradients;
  std::size_t next_gradient = 0, next_weight = 0;
  for (update::UpdateSlice& slice : chunk.slices) {
    if (find(slice.grad.data)) {
      BufferRange& range = chunk.reduced_gradients[next_gradient++];
      range.staging = gradients;
      gradients += range.staging_bytes();
      range.what = name_of("reduced gradient", slice);
      read(range);
      slice.grad.data = range.data();
    }
    if (find(slice.weight.data)) {
      BufferRange& range = chunk.weights[next_weight++];
      range.staging = weights;
      weights += range.staging_bytes();
      range.what = name_of("weights", slice);
      range.buffer->prepare_write(range.from, range.to, range.what);
      if (!plan_.has_master_of(slice.param)) read(range);  // the weights are the master weights
      slice.weight.data = range.data();
    }
  }
}

// Waits for the transfers of ranges that have one.
void DiskBackedBuffers::wait_all(const std::vector<BufferRange>& ranges, double& seconds) {
  for (const BufferRange& range : ranges)
    if (range.transfer) wait(range, seconds);
}

// Starts the reads of a chunk, once the chunk that used the same staging memory is written.
void DiskBackedBuffers::start_chunk(std::vector<Chunk>& chunks, std::size_t index) {
  if (index >= plan::kChunksInFlight) wait_all(chunks[index - plan::kChunksInFlight].weights, waits_.write);
  const int64_t bytes = disk_staging_.chunk_gradients + disk_staging_.chunk_weights;
  start_reads(chunks[index], chunks_.data() + static_cast<int64_t>(index % plan::kChunksInFlight) * bytes);
}

// The slices of touched parameters: those in memory, and the others divided into chunks.
DiskBackedBuffers::UpdateParts DiskBackedBuffers::parts_of_update(const std::vector<update::UpdateSlice>& slices,
                                                                  const std::vector<char>& touched) const {
  UpdateParts parts{{}, std::vector<Chunk>(1)};
  for (const update::UpdateSlice& slice : slices) {
    if (!touched[slice.param]) continue;
    if (!find(slice.grad.data) && !find(slice.weight.data)) {
      parts.in_memory.push_back(slice);
      continue;
    }
    for (update::UpdateSlice rest = slice; rest.count > 0;)
      if (!fill(parts.chunks.back(), rest)) parts.chunks.emplace_back();
  }
  return parts;
}

void DiskBackedBuffers::for_each_slice_in_memory(
    const std::vector<update::UpdateSlice>& slices, const std::vector<char>& touched,
    const std::function<void(const std::vector<update::UpdateSlice>&)>& work) {
  const MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  while (!prefetched_.empty()) discard_prefetched(prefetched_.begin());
  auto [in_memory, chunks] = parts_of_update(slices, touched);
  if (!in_memory.empty()) work(in_memory);
  if (chunks.back().slices.empty()) return;
  start_chunk(chunks, 0);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Chunk& chunk = chunks[i];
    if (i + 1 < chunks.size()) start_chunk(chunks, i + 1);
    wait_all(chunk.reduced_gradients, waits_.read);
    wait_all(chunk.weights, waits_.read);
    work(chunk.slices);
    for (BufferRange& range : chunk.weights)
      range.transfer = range.buffer->write(range.from, range.to, range.staging, range.what);
  }
  for (const Chunk& chunk : chunks) wait_all(chunk.weights, waits_.write);
}

}  // namespace zr::host::offload
