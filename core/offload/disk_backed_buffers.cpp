#include "offload/disk_backed_buffers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/dtype.hpp"
#include "comm/coll.hpp"

namespace zr::host::offload {

namespace {
constexpr const char* kTag = "disk-backed buffers in flight";
constexpr int kPrefetchedRanges = 2;  // ranges that are read ahead
}  // namespace

DiskBackedBuffers::DiskBackedBuffers(const plan::MemoryPlan& plan, Tiers& tiers, comm::CommRuntime& comm,
                                     Ledger& ledger)
    : plan_(plan), comm_(comm), ledger_(ledger), disk_staging_(plan_disk_staging(plan)) {
  buffers_.resize(plan.rank_plan.buffers.size());
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const plan::Buffer& b = plan.rank_plan.buffers[i];
    const auto tier = static_cast<std::size_t>(plan.tier_of(b));
    if (plan.input.tiers[tier].in_memory() || b.elements == 0) continue;
    const MemoryKind kind = b.role == ZR_ROLE_REDUCED_GRAD ? MemoryKind::gradients : MemoryKind::weights;
    const int64_t bytes = b.elements * size_of(b.dtype);
    buffers_[i] = std::make_unique<DiskBackedBuffer>(*tiers[tier], bytes, TierStore::LedgerEntry{kind, b.tag, bytes},
                                                     disk_staging_.resident_blocks[i], ledger);
    if (std::find(stores_.begin(), stores_.end(), tiers[tier].get()) == stores_.end())
      stores_.push_back(tiers[tier].get());
  }
  chunks_ =
      TrackedMemory(disk_staging_.chunk_bytes(), disk_staging_.align, ledger, Tier::host, MemoryKind::staging, kTag);
  registered_ = RegisteredMemory(chunks_.data(), chunks_.bytes(), stores_);
  grow(disk_staging_.collective_bytes);
}

DiskBackedBuffer* DiskBackedBuffers::find(const void* at) const {
  for (const auto& buffer : buffers_)
    if (buffer && buffer->holds(at)) return buffer.get();
  return nullptr;
}

DiskBackedBuffers::BufferRange DiskBackedBuffers::range_of(const zr_view& view) const {
  BufferRange range;
  range.buffer = find(view.data);
  if (!range.buffer) return range;
  range.from = bytes_of(view) - range.buffer->base();
  range.to = range.from + view.count * size_of(view.dtype);
  return range;
}

void DiskBackedBuffers::grow(int64_t bytes) {
  auto* memory = static_cast<char*>(comm_.allocate(bytes, disk_staging_.align, Tier::host, MemoryKind::staging, kTag));
  PeerBuffer staging{{memory, CommunicatorFree{&comm_}}, {}};
  staging.registered = RegisteredMemory(memory, bytes, stores_);
  peer_memory_.push_back(std::move(staging));
  staging_.add(memory, bytes);
}

void DiskBackedBuffers::wait(const BufferRange& range, double& seconds) {
  const auto begin = std::chrono::steady_clock::now();
  range.buffer->wait(range.transfer);
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Frees the staging memory of writes that are over.
void DiskBackedBuffers::release_finished_writes() {
  for (auto at = writing_.begin(); at != writing_.end();) {
    if (!at->buffer->is_over(at->transfer)) {
      ++at;
      continue;
    }
    staging_.release(at->staging);
    const BufferRange over = *at;
    at = writing_.erase(at);
    over.buffer->wait(over.transfer);
  }
}

// Allocates staging memory for a range. If none is free, drops ranges that were read ahead, then waits for writes.
// Returns false if collectives in progress must free memory first.
bool DiskBackedBuffers::allocate_staging(BufferRange& range) {
  release_finished_writes();
  const int64_t bytes = staging_bytes_of(range);
  if (!staging_.fits_when_empty(bytes)) {
    ledger_.plan(Tier::host, MemoryKind::staging, bytes);
    grow(bytes);
  }
  while (!(range.staging = staging_.allocate(bytes))) {
    if (!prefetched_.empty()) {
      discard_prefetched(std::prev(prefetched_.end()));
    } else if (!writing_.empty()) {
      const BufferRange first = writing_.front();
      writing_.pop_front();
      staging_.release(first.staging);
      wait(first, waits_.write);
    } else if (!staged_.empty()) {
      return false;
    } else {  // other ranges of this collective use the rest
      ledger_.plan(Tier::host, MemoryKind::staging, bytes);
      grow(bytes);
    }
  }
  return true;
}

void DiskBackedBuffers::discard_prefetched(std::list<BufferRange>::iterator at) {
  const BufferRange range = std::move(*at);
  prefetched_.erase(at);
  staging_.release(range.staging);
  range.buffer->wait(range.transfer);
}

void DiskBackedBuffers::discard_prefetched(const BufferRange& overlapping) {
  for (auto at = prefetched_.begin(); at != prefetched_.end();) {
    const auto range = at++;
    if (range->overlaps(overlapping)) discard_prefetched(range);
  }
}

void DiskBackedBuffers::read(BufferRange& range) {
  const auto begin = std::chrono::steady_clock::now();
  range.transfer = range.buffer->read(range.from, range.to, range.staging, range.what);
  waits_.write += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// True if a collective in progress will write a byte of the range. Bytes are compared, not blocks: a block that two
// ranges share is resident.
bool DiskBackedBuffers::will_be_written(const BufferRange& range) const {
  for (const auto& [number, ranges] : staged_)
    for (const BufferRange& other : ranges)
      if (other.writes && other.buffer == range.buffer && other.from < range.to && range.from < other.to) return true;
  return false;
}

// The operands that this rank uses in a collective.
DiskBackedBuffers::Operands DiskBackedBuffers::operands_of(const zr_coll& coll) const {
  Operands operands;
  BufferRange &src = operands.src, &dst = operands.dst;
  if (comm::reads_src(coll, comm_.rank()) && coll.src.count > 0) src = range_of(coll.src);
  if (comm::writes_dst(coll, comm_.rank()) && coll.dst.count > 0) dst = range_of(coll.dst);
  operands.src_in_dst = src.buffer && src.buffer == dst.buffer && dst.from <= src.from && src.to <= dst.to;
  src.reads = true;
  dst.reads = coll.flags & ZR_COLL_ACCUMULATE;
  dst.writes = true;
  for (BufferRange* range : {&src, &dst})
    if (range->buffer)
      range->what =
          fmt::format("'{}' for {} '{}'", range->buffer->tag(), name_of_op(coll.op), coll.label ? coll.label : "");
  return operands;
}

// Uses the staging memory and the read of the same range in prefetched_, if there is one.
bool DiskBackedBuffers::take_prefetched(BufferRange& range) {
  const auto prefetched = std::find_if(prefetched_.begin(), prefetched_.end(), [&](const BufferRange& other) {
    return other.buffer == range.buffer && other.from == range.from && other.to == range.to;
  });
  if (prefetched == prefetched_.end()) return false;
  ++reads_ahead_;
  range.staging = prefetched->staging;
  range.transfer = prefetched->transfer;
  prefetched_.erase(prefetched);
  return true;
}

// Gives all ranges staging memory and starts their reads. Returns false, and frees the memory, if collectives in
// progress must free memory first.
bool DiskBackedBuffers::start_staging(std::vector<BufferRange>& ranges) {
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    BufferRange& range = ranges[i];
    if (range.reads && take_prefetched(range)) continue;
    if (!allocate_staging(range)) {
      for (std::size_t before = 0; before < i; ++before) {
        if (ranges[before].transfer) ranges[before].buffer->wait(ranges[before].transfer);
        staging_.release(ranges[before].staging);
      }
      return false;
    }
    if (range.reads) read(range);
  }
  return true;
}

// Waits for the reads, and points the collective's operands to the staging memory.
void DiskBackedBuffers::finish_staging(std::vector<BufferRange>& ranges, zr_coll& coll) {
  for (BufferRange& range : ranges) {
    if (range.writes) range.buffer->prepare_write(range.from, range.to, range.what);
    reads_ += range.transfer != 0;
    if (range.transfer) wait(range, waits_.read);
    record_access(range, range.transfer != 0);
    range.transfer = 0;
    (range.writes ? coll.dst : coll.src).data = range.data();
  }
}

// Points the source to its part of the staged destination, and reads it unless the destination was read.
void DiskBackedBuffers::stage_src_in_dst(BufferRange src, const BufferRange& dst, zr_coll& coll) {
  coll.src.data = dst.data() + (src.from - dst.from);
  if (dst.reads) return;
  src.staging = dst.staging + src.buffer->block_begin(src.from) - src.buffer->block_begin(dst.from);
  read(src);
  wait(src, waits_.read);
}

uint64_t DiskBackedBuffers::stage(zr_coll& coll) {
  const MutexLock lock(mutex_);
  const Operands operands = operands_of(coll);
  const BufferRange &src = operands.src, &dst = operands.dst;
  if (!src.buffer && !dst.buffer) return kNotStaged;
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  for (const BufferRange* range : {&src, &dst})
    if (range->buffer && range->reads && will_be_written(*range)) return kNoCapacity;
  std::vector<BufferRange> ranges;
  if (src.buffer && !operands.src_in_dst) ranges.push_back(src);
  if (dst.buffer) ranges.push_back(dst);
  if (!start_staging(ranges)) return kNoCapacity;
  const uint64_t number = ++last_number_;
  std::vector<BufferRange>& ranges_in_use = staged_[number] = std::move(ranges);
  finish_staging(ranges_in_use, coll);
  if (operands.src_in_dst) stage_src_in_dst(src, ranges_in_use.back(), coll);
  prefetch();
  return number;
}

void DiskBackedBuffers::unstage(uint64_t number, bool succeeded) noexcept {
  const MutexLock lock(mutex_);
  const auto at = staged_.find(number);
  if (at == staged_.end()) return;
  for (BufferRange& range : at->second) try {
      if (range.writes && succeeded) {
        discard_prefetched(range);
        range.transfer = range.buffer->write(range.from, range.to, range.staging, range.what);
        writing_.push_back(range);
      } else {
        staging_.release(range.staging);
      }
    } catch (...) {
      failure_ = std::current_exception();
    }
  staged_.erase(at);
}

// Records a range, and checks that this step still follows the order of the last one.
void DiskBackedBuffers::record_access(const BufferRange& range, bool reads) {
  const std::size_t i = this_step_.size();
  order_matches_ = order_matches_ && i < last_step_.size() && last_step_[i].range.buffer == range.buffer &&
                   last_step_[i].range.from == range.from && last_step_[i].range.to == range.to &&
                   last_step_[i].reads == reads;
  this_step_.push_back({range, reads});
}

// Starts the next reads of the recorded order, except ranges that are written before they are read.
void DiskBackedBuffers::prefetch() {
  if (!order_matches_) return;
  int read = 0;
  for (std::size_t i = this_step_.size(); i < last_step_.size() && read < kPrefetchedRanges; ++i) {
    if (!last_step_[i].reads) continue;
    ++read;
    BufferRange next = last_step_[i].range;
    bool wait = next.buffer->is_written(next.from, next.to);
    for (const auto& [number, ranges] : staged_)
      for (const BufferRange& range : ranges) wait |= range.writes && range.overlaps(next);
    for (std::size_t k = this_step_.size(); k < i; ++k)
      wait |= last_step_[k].range.writes && last_step_[k].range.overlaps(next);
    for (const BufferRange& range : prefetched_) wait |= range.overlaps(next);
    if (wait) continue;
    next.staging = staging_.allocate(staging_bytes_of(next));
    if (!next.staging) continue;
    prefetched_.push_back(next);
    prefetched_.back().transfer = next.buffer->read(next.from, next.to, next.staging, next.what);
  }
}

void DiskBackedBuffers::step_end() {
  const MutexLock lock(mutex_);
  while (!prefetched_.empty()) discard_prefetched(prefetched_.begin());
  last_step_ = std::move(this_step_);
  this_step_.clear();
  order_matches_ = true;
}

}  // namespace zr::host::offload
