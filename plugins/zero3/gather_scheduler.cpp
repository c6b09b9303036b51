#include "gather_scheduler.hpp"

#include <algorithm>

namespace zero3 {

namespace {
std::vector<int64_t> sizes(const GatherGroups& groups, int64_t width) {
  std::vector<int64_t> bytes;
  for (const GatherGroup& group : groups.all()) bytes.push_back(group.size * width);
  return bytes;
}
}  // namespace

int64_t all_gather_buffer_elements(const GatherGroups& groups, const Limits& limits, int64_t width) {
  const int64_t wanted = std::min(limits.prefetch / width + groups.largest_use(), limits.live / width);
  return std::min(groups.sharded(), std::max(wanted, groups.largest_use()));
}

GatherScheduler::GatherScheduler(const zr_plan_in& in, const GatherGroups& groups, const Limits& limits,
                                 const zr::Comm& comm, const zr_view& shard, const zr_view& buffer,
                                 const zr::Host& host)
    : in_(&in),
      groups_(groups),
      limits_(limits),
      comm_(comm),
      host_(host),
      shard_(shard),
      buffer_view_(buffer),
      align_(in.align),
      width_(zr::bytes_of(in.weight_dtype)),
      buffer_(buffer.count),
      order_(sizes(groups, zr::bytes_of(in.weight_dtype))),
      live_(groups.all().size()) {
  for (const GatherGroup& group : groups.all()) {
    counts_.emplace_back();
    for (int32_t r = 0; r < in.world; ++r) counts_.back().push_back(group.part(r).size());
  }
}

GatherScheduler::~GatherScheduler() {
  for (const GroupState& live : live_) free_overflow(live.overflow);
  for (const auto& [bytes, memory] : spare_) free_overflow(memory);
}

zr_view GatherScheduler::memory(uint32_t group) const {
  if (live_[group].offset >= 0) return zr::part(buffer_view_, live_[group].offset, groups_.all()[group].size);
  zr_view view = live_[group].overflow;
  view.dtype = in_->weight_dtype;
  view.count = groups_.all()[group].size;
  return view;
}

void GatherScheduler::acquire(const uint32_t* params, uint32_t n, uint32_t phase, zr_view* full) {
  const bool traced = phase == ZR_FORWARD || phase == ZR_BACKWARD;
  std::vector<uint32_t> wanted;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t c = groups_.group_of(params[i]);
    GroupState& live = live_[c];
    if (live.users++ > 0) continue;
    wanted.push_back(c);
    if (traced && !order_.use(c)) order_changed(c);
    if (live.ahead) ahead_bytes_ -= bytes(c);
    live.ahead = false;
  }
  // Allocate the largest group first: a small one could fragment the only free range that is large enough.
  std::stable_sort(wanted.begin(), wanted.end(),
                   [&](uint32_t a, uint32_t b) { return aligned_size(a) > aligned_size(b); });
  for (const uint32_t c : wanted) {
    if (live_[c].state != State::absent) continue;
    while (!take(c))
      if (!drop_farthest(-1)) {
        take_overflow(c, phase);
        break;
      }
    start(c);
  }
  if (traced) prefetch();
  for (const uint32_t c : wanted) arrive(c);
  for (uint32_t i = 0; i < n; ++i)
    full[i] = zr::part(memory(groups_.group_of(params[i])), groups_.offset(params[i]), in_->params[params[i]]->count);
}

void GatherScheduler::release(const uint32_t* params, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t c = groups_.group_of(params[i]);
    GroupState& live = live_[c];
    if (--live.users > 0) continue;
    const int64_t distance = order_.distance(c);
    if (distance == ExecutionOrder::kNever || distance > limits_.reuse || live_bytes_ > limits_.live || live.offset < 0)
      drop(c);
  }
}

void GatherScheduler::order_changed(uint32_t c) {
  constexpr int kMaxReports = 3;
  if (comm_.rank() != 0 || changes_++ >= kMaxReports) return;
  host_.log(ZR_LOG_INFO, std::string("zero3: the order of execution changed at '") +
                             in_->params[groups_.all()[c].params.front()]->name +
                             "'; weights are gathered on demand until the order is recorded again" +
                             (changes_ == kMaxReports ? " (further changes are not logged)" : ""));
}

// Allocates a group in the all-gather buffer, within the limit on live bytes.
bool GatherScheduler::take(uint32_t c) {
  if (live_bytes_ > 0 && live_bytes_ + bytes(c) > limits_.live) return false;
  live_[c].offset = buffer_.take(aligned_size(c));
  return live_[c].offset >= 0;
}

// Overflow memory of training passes is kept for the next time and only grows, so a model with a constant execution
// order soon allocates no more.
zr_view GatherScheduler::alloc_overflow(int64_t bytes, bool stays) {
  if (stays) {
    if (const auto fits = spare_.lower_bound(bytes); fits != spare_.end()) return spare_.extract(fits).mapped();
    if (!spare_.empty()) free_overflow(spare_.extract(std::prev(spare_.end())).mapped());
  }
  zr_view memory{};
  zr_error error = zr::no_error();
  zr::check(host_.need<zr_memory_service>().alloc(host_.abi(), static_cast<uint64_t>(bytes), 64,
                                                  "all_gather: gathered weights, overflow", &memory, &error),
            error);
  return memory;
}

void GatherScheduler::free_overflow(const zr_view& memory) {
  if (memory.data) host_.need<zr_memory_service>().free(host_.abi(), &memory);
}

void GatherScheduler::take_overflow(uint32_t c, uint32_t phase) {
  GroupState& live = live_[c];
  live.offset = buffer_.take(aligned_size(c));  // the limit on live bytes does not apply within one operator
  if (live.offset >= 0) return;
  live.stays = phase != ZR_EXPORT_PHASE;  // an export may gather the full model, but only once
  live.overflow = alloc_overflow(bytes(c), live.stays);
  if (!live.stays || reported_overflow_) return;
  reported_overflow_ = true;
  if (comm_.rank() == 0)
    host_.log(ZR_LOG_INFO, std::string("zero3: '") + in_->params[groups_.all()[c].params.front()]->name +
                               "' does not fit into the all-gather buffer beside the other weights of the same "
                               "operator; it is gathered into extra memory. A larger prefetch_bytes makes the "
                               "all-gather buffer larger");
}

// Drops the unused group whose next use is farthest, if it is more than `beyond` bytes away. False if no group is that
// far away.
bool GatherScheduler::drop_farthest(int64_t beyond) {
  uint32_t farthest = 0;
  int64_t distance = beyond;
  for (const uint32_t c : held_) {
    if (live_[c].users > 0) continue;
    const int64_t d = order_.distance(c);
    if (d > distance) {
      farthest = c;
      distance = d;
    }
  }
  if (distance == beyond) return false;
  drop(farthest);
  return true;
}

void GatherScheduler::drop(uint32_t c) {
  GroupState& live = live_[c];
  live.done.wait();  // a gather may still write to its memory
  live.done = zr::Done();
  if (live.offset >= 0) buffer_.release(live.offset, aligned_size(c));
  if (live.overflow.data && live.stays) {
    spare_.emplace(live.overflow.count, live.overflow);
  } else {
    free_overflow(live.overflow);
  }
  if (live.ahead) ahead_bytes_ -= bytes(c);
  live_bytes_ -= bytes(c);
  live.overflow = zr_view{};
  live.offset = -1;
  live.ahead = false;
  live.state = State::absent;
  held_.erase(std::find(held_.begin(), held_.end(), c));
  next_ = std::min(next_, order_.next(c));  // prefetch() may have skipped the group's next use while it was gathered
}

void GatherScheduler::start(uint32_t c) {
  const GatherGroup& group = groups_.all()[c];
  GroupState& live = live_[c];
  held_.push_back(c);
  live_bytes_ += bytes(c);
  live.state = State::gathering;
  live.done = comm_.start(zr::all_gather(zr::part(shard_, group.own, group.part(comm_.rank()).size()), memory(c),
                                         in_->params[group.params.front()]->name, counts_[c].data()));
}

void GatherScheduler::arrive(uint32_t c) {
  GroupState& live = live_[c];
  if (live.state != State::gathering) return;
  live.done.wait();
  live.done = zr::Done();
  live.state = State::gathered;
}

void GatherScheduler::prefetch() {
  if (!order_.follows()) return;
  const auto& order = order_.order();
  for (next_ = std::max(next_, order_.at()); next_ < order.size(); ++next_) {
    const uint32_t c = order[next_];
    if (live_[c].state != State::absent) continue;
    if (ahead_bytes_ + bytes(c) > limits_.prefetch) return;
    const int64_t when = order_.distance(c);
    while (!take(c))
      if (!drop_farthest(when)) return;
    live_[c].ahead = true;
    ahead_bytes_ += bytes(c);
    start(c);
  }
}

void GatherScheduler::wait() {
  for (const uint32_t c : std::vector<uint32_t>(held_)) arrive(c);
}

void GatherScheduler::pass_end() {
  wait();
  const size_t at = order_.at();
  if (order_.follows() && at > 0 && at < order_.order().size()) order_changed(order_.order()[at]);  // ended early
  order_.end();
  next_ = 0;
}

void GatherScheduler::refresh() {
  for (const uint32_t c : std::vector<uint32_t>(held_)) {
    if (live_[c].users > 0)
      throw zr::PluginError(
          ZR_INVALID, std::string("weights changed while '") + in_->params[groups_.all()[c].params.front()]->name +
                          "' was in use; end the zr::gather scope before engine.step() or engine.set()");
    drop(c);
  }
}

}  // namespace zero3
