#include "offload/pages.hpp"

#include <algorithm>
#include <chrono>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/text.hpp"
#include "comm/coll.hpp"

namespace zr::host {

namespace {
constexpr const char* kTag = "pages under way";
constexpr int kAhead = 2;  // ranges that are read before they are asked for
}  // namespace

Pages::Pages(const Plan& plan, Tiers& tiers, Communicator& comm, Ledger& ledger)
    : plan_(plan), comm_(comm), ledger_(ledger), paging_(paging_of(plan)) {
  buffers_.resize(plan.mine.buffers.size());
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& b = plan.mine.buffers[i];
    const auto place = static_cast<std::size_t>(plan.place_of(b));
    if (plan.input.places[place].in_memory() || b.elements == 0) continue;
    const Kind kind = b.role == ZR_ROLE_SUM ? Kind::gradients : Kind::weights;
    const int64_t bytes = b.elements * size_of(b.dtype);
    buffers_[i] = std::make_unique<PagedBuffer>(*tiers[place], bytes, TierStore::Held{kind, b.tag, bytes},
                                                paging_.edges[i], ledger);
    if (std::find(stores_.begin(), stores_.end(), tiers[place].get()) == stores_.end())
      stores_.push_back(tiers[place].get());
  }
  chunks_ = CountedMemory(paging_.chunk_bytes(), paging_.align, ledger, Tier::host, Kind::staging, kTag);
  announced_ = Announced(chunks_.data(), chunks_.bytes(), stores_);
  grow(paging_.collective_bytes);
}

PagedBuffer* Pages::find(const void* at) const {
  for (const auto& buffer : buffers_)
    if (buffer && buffer->holds(at)) return buffer.get();
  return nullptr;
}

Pages::Range Pages::range_of(const zr_view& view) const {
  Range range;
  range.buffer = find(view.data);
  if (!range.buffer) return range;
  range.from = bytes_of(view) - range.buffer->base();
  range.to = range.from + view.count * size_of(view.dtype);
  return range;
}

void Pages::grow(int64_t bytes) {
  auto* memory = static_cast<char*>(comm_.allocate(bytes, paging_.align, Tier::host, Kind::staging, kTag));
  Room room{{memory, Free{&comm_}}, {}};
  room.announced = Announced(memory, bytes, stores_);
  peer_memory_.push_back(std::move(room));
  rooms_.add(memory, bytes);
}

void Pages::wait(const Range& range, double& seconds) {
  const auto begin = std::chrono::steady_clock::now();
  range.buffer->wait(range.move);
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Rooms whose writes are over.
void Pages::sweep() {
  for (auto at = behind_.begin(); at != behind_.end();) {
    if (!at->buffer->is_over(at->move)) {
      ++at;
      continue;
    }
    rooms_.give(at->room);
    const Range over = *at;
    at = behind_.erase(at);
    over.buffer->wait(over.move);
  }
}

// What was read too early goes first, then what is being written; the rest is for collectives under way to give.
bool Pages::take_room(Range& range) {
  sweep();
  const int64_t bytes = room_of(range);
  if (!rooms_.could_hold(bytes)) {
    ledger_.plan(Tier::host, Kind::staging, bytes);
    grow(bytes);
  }
  while (!(range.room = rooms_.take(bytes))) {
    if (!ahead_.empty()) {
      drop_ahead(std::prev(ahead_.end()));
    } else if (!behind_.empty()) {
      const Range first = behind_.front();
      behind_.pop_front();
      rooms_.give(first.room);
      wait(first, waits_.write);
    } else if (!entered_.empty()) {
      return false;
    } else {  // what it needs besides takes the rest
      ledger_.plan(Tier::host, Kind::staging, bytes);
      grow(bytes);
    }
  }
  return true;
}

void Pages::drop_ahead(std::list<Range>::iterator at) {
  const Range range = *at;
  ahead_.erase(at);
  rooms_.give(range.room);
  range.buffer->wait(range.move);
}

void Pages::drop_ahead(const Range& overlapping) {
  for (auto at = ahead_.begin(); at != ahead_.end();) {
    const auto one = at++;
    if (one->overlaps(overlapping)) drop_ahead(one);
  }
}

void Pages::read(Range& range) {
  const auto begin = std::chrono::steady_clock::now();
  range.move = range.buffer->read(range.from, range.to, range.room, range.what);
  waits_.write += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A collective under way is to write some of it, to the byte: blocks in which two ranges meet stay in memory.
bool Pages::is_entered_to_write(const Range& range) const {
  for (const auto& [number, ranges] : entered_)
    for (const Range& one : ranges)
      if (one.writes && one.buffer == range.buffer && one.from < range.to && range.from < one.to) return true;
  return false;
}

uint64_t Pages::enter(zr_coll& coll) {
  const std::lock_guard lock(mutex_);
  Range src, dst;
  if (reads_src(coll, comm_.rank()) && coll.src.count > 0) src = range_of(coll.src);
  if (writes_dst(coll, comm_.rank()) && coll.dst.count > 0) dst = range_of(coll.dst);
  if (!src.buffer && !dst.buffer) return kNothing;
  if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  const bool accumulates = coll.flags & ZR_COLL_ACCUMULATE;
  const bool inside = src.buffer && src.buffer == dst.buffer && dst.from <= src.from && src.to <= dst.to;
  for (const Range* read : {&src, accumulates ? &dst : nullptr})
    if (read && read->buffer && is_entered_to_write(*read)) return kNoRoom;
  dst.writes = true;
  for (Range* range : {&src, &dst})
    if (range->buffer)
      range->what = "'" + range->buffer->tag() + "' for " + std::string(name_of_op(coll.op)) + " '" +
                    (coll.label ? coll.label : "") + "'";
  std::vector<Range> ranges;
  if (src.buffer && !inside) ranges.push_back(src);
  if (dst.buffer) ranges.push_back(dst);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    Range& range = ranges[i];
    const bool reads = !range.writes || accumulates;
    const auto came = std::find_if(ahead_.begin(), ahead_.end(), [&](const Range& one) {
      return reads && one.buffer == range.buffer && one.from == range.from && one.to == range.to;
    });
    if (came != ahead_.end()) {
      ++reads_ahead_;
      range.room = came->room;
      range.move = came->move;
      ahead_.erase(came);
    } else if (!take_room(range)) {
      for (std::size_t before = 0; before < i; ++before) {
        if (ranges[before].move) ranges[before].buffer->wait(ranges[before].move);
        rooms_.give(ranges[before].room);
      }
      return kNoRoom;
    } else if (reads) {
      read(range);
    }
  }
  const uint64_t number = ++last_;
  auto& kept = entered_[number] = ranges;
  for (Range& range : kept) {
    if (range.writes) range.buffer->prepare_write(range.from, range.to, range.what);
    reads_ += range.move != 0;
    if (range.move) wait(range, waits_.read);
    follow(range, range.move != 0);
    range.move = 0;
    (range.writes ? coll.dst : coll.src).data = range.data();
  }
  if (inside) {
    const Range& room = kept.back();
    coll.src.data = room.data() + (src.from - dst.from);
    if (!accumulates) {
      src.room = room.room + src.buffer->lo(src.from) - src.buffer->lo(dst.from);
      read(src);
      wait(src, waits_.read);
    }
  }
  read_ahead();
  return number;
}

void Pages::leave(uint64_t number, bool well) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = entered_.find(number);
  if (at == entered_.end()) return;
  for (Range& range : at->second) try {
      if (range.writes && well) {
        drop_ahead(range);
        range.move = range.buffer->write(range.from, range.to, range.room, range.what);
        behind_.push_back(range);
      } else {
        rooms_.give(range.room);
      }
    } catch (...) {
      failed_ = std::current_exception();
    }
  entered_.erase(at);
}

// Whether the order is still that of the last step.
void Pages::follow(const Range& range, bool reads) {
  const std::size_t i = this_step_.size();
  follows_ = follows_ && i < last_step_.size() && last_step_[i].range.buffer == range.buffer &&
             last_step_[i].range.from == range.from && last_step_[i].range.to == range.to &&
             last_step_[i].reads == reads;
  this_step_.push_back({range, reads});
}

// Not what is written before it is read.
void Pages::read_ahead() {
  if (!follows_) return;
  int read = 0;
  for (std::size_t i = this_step_.size(); i < last_step_.size() && read < kAhead; ++i) {
    if (!last_step_[i].reads) continue;
    ++read;
    Range next = last_step_[i].range;
    bool wait = next.buffer->is_written(next.from, next.to);
    for (const auto& [number, ranges] : entered_)
      for (const Range& range : ranges) wait |= range.writes && range.overlaps(next);
    for (std::size_t k = this_step_.size(); k < i; ++k)
      wait |= last_step_[k].range.writes && last_step_[k].range.overlaps(next);
    for (const Range& range : ahead_) wait |= range.overlaps(next);
    if (wait || !(next.room = rooms_.take(room_of(next)))) continue;
    ahead_.push_back(next);
    ahead_.back().move = next.buffer->read(next.from, next.to, next.room, next.what);
  }
}

void Pages::step_end() {
  const std::lock_guard lock(mutex_);
  while (!ahead_.empty()) drop_ahead(ahead_.begin());
  last_step_ = std::move(this_step_);
  this_step_.clear();
  follows_ = true;
}

}  // namespace zr::host
