#include "offload/disk_backed_buffers.hpp"

#include <algorithm>
#include <chrono>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/coll.hpp"

namespace zr::host::offload {

namespace {
constexpr const char* kTag = "disk-backed buffers in flight";
constexpr int kAhead = 2;  // ranges that are read ahead
}  // namespace

DiskBackedBuffers::DiskBackedBuffers(const plan::MemoryPlan& plan, Tiers& tiers, comm::CommRuntime& comm,
                                     Ledger& ledger)
    : plan_(plan), comm_(comm), ledger_(ledger), disk_staging_(plan_disk_staging(plan)) {
  buffers_.resize(plan.mine.buffers.size());
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const plan::Buffer& b = plan.mine.buffers[i];
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
  PeerBuffer staging{{memory, Free{&comm_}}, {}};
  staging.registered = RegisteredMemory(memory, bytes, stores_);
  peer_memory_.push_back(std::move(staging));
  staging_.add(memory, bytes);
}

void DiskBackedBuffers::wait(const BufferRange& range, double& seconds) {
  const auto begin = std::chrono::steady_clock::now();
  range.buffer->wait(range.move);
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Frees the staging memory of writes that are over.
void DiskBackedBuffers::sweep() {
  for (auto at = behind_.begin(); at != behind_.end();) {
    if (!at->buffer->is_over(at->move)) {
      ++at;
      continue;
    }
    staging_.release(at->staging);
    const BufferRange over = *at;
    at = behind_.erase(at);
    over.buffer->wait(over.move);
  }
}

// Allocates staging memory for a range. If none is free, drops ranges that were read ahead, then waits for writes.
// Returns false if collectives in progress must free memory first.
bool DiskBackedBuffers::take_staging(BufferRange& range) {
  sweep();
  const int64_t bytes = staging_bytes_of(range);
  if (!staging_.fits_when_empty(bytes)) {
    ledger_.plan(Tier::host, MemoryKind::staging, bytes);
    grow(bytes);
  }
  while (!(range.staging = staging_.allocate(bytes))) {
    if (!ahead_.empty()) {
      drop_ahead(std::prev(ahead_.end()));
    } else if (!behind_.empty()) {
      const BufferRange first = behind_.front();
      behind_.pop_front();
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

void DiskBackedBuffers::drop_ahead(std::list<BufferRange>::iterator at) {
  const BufferRange range = *at;
  ahead_.erase(at);
  staging_.release(range.staging);
  range.buffer->wait(range.move);
}

void DiskBackedBuffers::drop_ahead(const BufferRange& overlapping) {
  for (auto at = ahead_.begin(); at != ahead_.end();) {
    const auto one = at++;
    if (one->overlaps(overlapping)) drop_ahead(one);
  }
}

void DiskBackedBuffers::read(BufferRange& range) {
  const auto begin = std::chrono::steady_clock::now();
  range.move = range.buffer->read(range.from, range.to, range.staging, range.what);
  waits_.write += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// True if a collective in progress will write a byte of the range. Bytes are compared, not blocks: a block that two
// ranges share is resident.
bool DiskBackedBuffers::is_entered_to_write(const BufferRange& range) const {
  for (const auto& [number, ranges] : staged_)
    for (const BufferRange& one : ranges)
      if (one.writes && one.buffer == range.buffer && one.from < range.to && range.from < one.to) return true;
  return false;
}

uint64_t DiskBackedBuffers::stage(zr_coll& coll) {
  const std::lock_guard lock(mutex_);
  BufferRange src, dst;
  if (comm::reads_src(coll, comm_.rank()) && coll.src.count > 0) src = range_of(coll.src);
  if (comm::writes_dst(coll, comm_.rank()) && coll.dst.count > 0) dst = range_of(coll.dst);
  if (!src.buffer && !dst.buffer) return kNotStaged;
  if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  const bool accumulates = coll.flags & ZR_COLL_ACCUMULATE;
  const bool inside = src.buffer && src.buffer == dst.buffer && dst.from <= src.from && src.to <= dst.to;
  for (const BufferRange* read : {&src, accumulates ? &dst : nullptr})
    if (read && read->buffer && is_entered_to_write(*read)) return kNoCapacity;
  dst.writes = true;
  for (BufferRange* range : {&src, &dst})
    if (range->buffer)
      range->what = "'" + range->buffer->tag() + "' for " + std::string(name_of_op(coll.op)) + " '" +
                    (coll.label ? coll.label : "") + "'";
  std::vector<BufferRange> ranges;
  if (src.buffer && !inside) ranges.push_back(src);
  if (dst.buffer) ranges.push_back(dst);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    BufferRange& range = ranges[i];
    const bool reads = !range.writes || accumulates;
    const auto came = std::find_if(ahead_.begin(), ahead_.end(), [&](const BufferRange& one) {
      return reads && one.buffer == range.buffer && one.from == range.from && one.to == range.to;
    });
    if (came != ahead_.end()) {
      ++reads_ahead_;
      range.staging = came->staging;
      range.move = came->move;
      ahead_.erase(came);
    } else if (!take_staging(range)) {
      for (std::size_t before = 0; before < i; ++before) {
        if (ranges[before].move) ranges[before].buffer->wait(ranges[before].move);
        staging_.release(ranges[before].staging);
      }
      return kNoCapacity;
    } else if (reads) {
      read(range);
    }
  }
  const uint64_t number = ++last_;
  auto& kept = staged_[number] = ranges;
  for (BufferRange& range : kept) {
    if (range.writes) range.buffer->prepare_write(range.from, range.to, range.what);
    reads_ += range.move != 0;
    if (range.move) wait(range, waits_.read);
    follow(range, range.move != 0);
    range.move = 0;
    (range.writes ? coll.dst : coll.src).data = range.data();
  }
  if (inside) {
    const BufferRange& staging = kept.back();
    coll.src.data = staging.data() + (src.from - dst.from);
    if (!accumulates) {
      src.staging = staging.staging + src.buffer->block_begin(src.from) - src.buffer->block_begin(dst.from);
      read(src);
      wait(src, waits_.read);
    }
  }
  read_ahead();
  return number;
}

void DiskBackedBuffers::unstage(uint64_t number, bool well) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = staged_.find(number);
  if (at == staged_.end()) return;
  for (BufferRange& range : at->second) try {
      if (range.writes && well) {
        drop_ahead(range);
        range.move = range.buffer->write(range.from, range.to, range.staging, range.what);
        behind_.push_back(range);
      } else {
        staging_.release(range.staging);
      }
    } catch (...) {
      failed_ = std::current_exception();
    }
  staged_.erase(at);
}

// Records a range, and checks that this step still follows the order of the last one.
void DiskBackedBuffers::follow(const BufferRange& range, bool reads) {
  const std::size_t i = this_step_.size();
  follows_ = follows_ && i < last_step_.size() && last_step_[i].range.buffer == range.buffer &&
             last_step_[i].range.from == range.from && last_step_[i].range.to == range.to &&
             last_step_[i].reads == reads;
  this_step_.push_back({range, reads});
}

// Starts the next reads of the recorded order, except ranges that are written before they are read.
void DiskBackedBuffers::read_ahead() {
  if (!follows_) return;
  int read = 0;
  for (std::size_t i = this_step_.size(); i < last_step_.size() && read < kAhead; ++i) {
    if (!last_step_[i].reads) continue;
    ++read;
    BufferRange next = last_step_[i].range;
    bool wait = next.buffer->is_written(next.from, next.to);
    for (const auto& [number, ranges] : staged_)
      for (const BufferRange& range : ranges) wait |= range.writes && range.overlaps(next);
    for (std::size_t k = this_step_.size(); k < i; ++k)
      wait |= last_step_[k].range.writes && last_step_[k].range.overlaps(next);
    for (const BufferRange& range : ahead_) wait |= range.overlaps(next);
    if (wait || !(next.staging = staging_.allocate(staging_bytes_of(next)))) continue;
    ahead_.push_back(next);
    ahead_.back().move = next.buffer->read(next.from, next.to, next.staging, next.what);
  }
}

void DiskBackedBuffers::step_end() {
  const std::lock_guard lock(mutex_);
  while (!ahead_.empty()) drop_ahead(ahead_.begin());
  last_step_ = std::move(this_step_);
  this_step_.clear();
  follows_ = true;
}

}  // namespace zr::host::offload
