#include "gather_scheduler.hpp"

#include <algorithm>

namespace zero3 {

namespace {
std::vector<int64_t> sizes(const GatherGroups& groups, int64_t width) {
  std::vector<int64_t> bytes;
  for (const GatherGroup& group : groups.groups()) bytes.push_back(group.size * width);
  return bytes;
}
}  // namespace

int64_t all_gather_buffer_elements(const GatherGroups& groups, const Limits& limits, int64_t width) {
  const int64_t elements = std::min(limits.prefetch / width + groups.largest_use(), limits.gathered / width);
  return std::min(groups.sharded(), std::max(elements, groups.largest_use()));
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
      rounds_(ZR_HAS(&in, zr_plan_in, flags) && (in.flags & ZR_PLAN_ROUNDED_WEIGHTS)),
      buffer_(buffer.count),
      order_(sizes(groups, zr::bytes_of(in.weight_dtype))),
      group_states_(groups.groups().size()) {
  for (const GatherGroup& group : groups.groups()) {
    counts_.emplace_back();
    for (int32_t r = 0; r < in.world; ++r) counts_.back().push_back(group.part(r).size());
  }
}

GatherScheduler::~GatherScheduler() {
  for (const GroupState& state : group_states_) free_overflow(state.overflow);
  for (const auto& [bytes, memory] : spare_overflow_) free_overflow(memory);
}

zr_view GatherScheduler::memory(uint32_t group) const {
  if (group_states_[group].offset >= 0)
    return zr::part(buffer_view_, group_states_[group].offset, groups_.groups()[group].size);
  zr_view view = group_states_[group].overflow;
  view.dtype = in_->weight_dtype;
  view.count = groups_.groups()[group].size;
  return view;
}

// Throws if a parameter that is needed exactly is in use with rounded weights.
void GatherScheduler::check_use(const uint32_t* params, uint32_t n, bool rounds) const {
  for (uint32_t i = 0; i < n; ++i) {
    const GroupState& state = group_states_[groups_.group_of(params[i])];
    if (state.users > 0 && state.state != State::absent && state.is_rounded && !rounds)
      throw zr::PluginError(ZR_INVALID, std::string("'") + in_->params[params[i]]->name +
                                            "' is in use with rounded weights (communicator.weights) while its exact "
                                            "weights are needed; end the operator before zr::gather");
  }
}

// Adds a user for each parameter. Returns the groups that had none.
std::vector<uint32_t> GatherScheduler::begin_use(const uint32_t* params, uint32_t n, bool recorded, bool rounds) {
  std::vector<uint32_t> needed;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t group = groups_.group_of(params[i]);
    GroupState& state = group_states_[group];
    if (state.users++ > 0) continue;
    if (state.state != State::absent && state.is_rounded != rounds) drop(group);
    needed.push_back(group);
    if (recorded && !order_.use(group)) order_changed(group);
    if (state.prefetched) prefetched_bytes_ -= bytes(group);
    state.prefetched = false;
  }
  return needed;
}

void GatherScheduler::acquire(const uint32_t* params, uint32_t n, uint32_t phase, zr_view* full) {
  const bool recorded = phase == ZR_FORWARD || phase == ZR_BACKWARD, rounds = rounds_ && phase != ZR_EXPORT_PHASE;
  check_use(params, n, rounds);
  std::vector<uint32_t> needed = begin_use(params, n, recorded, rounds);
  // Allocate the largest group first: a small one could fragment the only free range that is large enough.
  std::stable_sort(needed.begin(), needed.end(),
                   [&](uint32_t a, uint32_t b) { return aligned_size(a) > aligned_size(b); });
  for (const uint32_t group : needed) {
    if (group_states_[group].state != State::absent) continue;
    while (!allocate(group))
      if (!drop_farthest(-1)) {
        allocate_overflow(group, phase);
        break;
      }
    start(group, rounds);
  }
  if (recorded) prefetch();
  for (const uint32_t group : needed) wait_for(group);
  for (uint32_t i = 0; i < n; ++i)
    full[i] = zr::part(memory(groups_.group_of(params[i])), groups_.offset(params[i]), in_->params[params[i]]->count);
}

void GatherScheduler::release(const uint32_t* params, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t group = groups_.group_of(params[i]);
    GroupState& state = group_states_[group];
    if (--state.users > 0) continue;
    const int64_t distance = order_.distance(group);
    if (distance == ExecutionOrder::kNever || distance > limits_.reuse || gathered_bytes_ > limits_.gathered ||
        state.offset < 0 || state.is_rounded != rounds_)
      drop(group);
  }
}

void GatherScheduler::order_changed(uint32_t group) {
  constexpr int kMaxReports = 3;
  if (comm_.rank() != 0 || changes_++ >= kMaxReports) return;
  host_.log(ZR_LOG_INFO, std::string("zero3: the order of execution changed at '") +
                             in_->params[groups_.groups()[group].params.front()]->name +
                             "'; weights are gathered on demand until the order is recorded again" +
                             (changes_ == kMaxReports ? " (further changes are not logged)" : ""));
}

// Allocates a group in the all-gather buffer, within the limit on gathered bytes.
bool GatherScheduler::allocate(uint32_t group) {
  if (gathered_bytes_ > 0 && gathered_bytes_ + bytes(group) > limits_.gathered) return false;
  group_states_[group].offset = buffer_.allocate(aligned_size(group));
  return group_states_[group].offset >= 0;
}

// Overflow memory of training passes is kept for the next time and only grows, so a model with a constant execution
// order soon allocates no more.
zr_view GatherScheduler::allocate_overflow_memory(int64_t bytes, bool is_reused) {
  if (is_reused) {
    if (const auto fits = spare_overflow_.lower_bound(bytes); fits != spare_overflow_.end())
      return spare_overflow_.extract(fits).mapped();
    if (!spare_overflow_.empty()) free_overflow(spare_overflow_.extract(std::prev(spare_overflow_.end())).mapped());
  }
  return zr::allocate(host_, static_cast<uint64_t>(bytes), "all_gather: gathered weights, overflow", 0,
                      buffer_view_.device);
}

void GatherScheduler::free_overflow(const zr_view& memory) {
  if (memory.data) host_.need<zr_memory_service>().free(host_.abi(), &memory);
}

void GatherScheduler::allocate_overflow(uint32_t group, uint32_t phase) {
  GroupState& state = group_states_[group];
  state.offset =
      buffer_.allocate(aligned_size(group));  // the limit on gathered bytes does not apply within one operator
  if (state.offset >= 0) return;
  state.is_reused = phase != ZR_EXPORT_PHASE;  // an export may gather the full model, but only once
  state.overflow = allocate_overflow_memory(bytes(group), state.is_reused);
  if (!state.is_reused || reported_overflow_) return;
  reported_overflow_ = true;
  if (comm_.rank() == 0)
    host_.log(ZR_LOG_INFO, std::string("zero3: '") + in_->params[groups_.groups()[group].params.front()]->name +
                               "' does not fit into the all-gather buffer beside the other weights of the same "
                               "operator; it is gathered into extra memory. A larger prefetch_bytes makes the "
                               "all-gather buffer larger");
}

// Drops the unused group whose next use is farthest, if it is more than `beyond` bytes away. False if no group is that
// far away.
bool GatherScheduler::drop_farthest(int64_t beyond) {
  uint32_t farthest = 0;
  int64_t distance = beyond;
  for (const uint32_t group : gathered_groups_) {
    if (group_states_[group].users > 0) continue;
    const int64_t d = order_.distance(group);
    if (d > distance) {
      farthest = group;
      distance = d;
    }
  }
  if (distance == beyond) return false;
  drop(farthest);
  return true;
}

void GatherScheduler::drop(uint32_t group) {
  GroupState& state = group_states_[group];
  state.done.wait();  // a gather may still write to its memory
  state.done = zr::Done();
  if (state.offset >= 0) buffer_.release(state.offset, aligned_size(group));
  if (state.overflow.data && state.is_reused) {
    spare_overflow_.emplace(state.overflow.count, state.overflow);
  } else {
    free_overflow(state.overflow);
  }
  if (state.prefetched) prefetched_bytes_ -= bytes(group);
  gathered_bytes_ -= bytes(group);
  state.overflow = zr_view{};
  state.offset = -1;
  state.prefetched = false;
  state.state = State::absent;
  gathered_groups_.erase(std::find(gathered_groups_.begin(), gathered_groups_.end(), group));
  next_ =
      std::min(next_, order_.next(group));  // prefetch() may have skipped the group's next use while it was gathered
}

void GatherScheduler::start(uint32_t group, bool rounds) {
  const GatherGroup& gather_group = groups_.groups()[group];
  GroupState& state = group_states_[group];
  gathered_groups_.push_back(group);
  gathered_bytes_ += bytes(group);
  state.state = State::gathering;
  state.is_rounded = rounds;
  state.done = comm_.start(zr::all_gather(
      zr::part(shard_, gather_group.own_offset, gather_group.part(comm_.rank()).size()), memory(group),
      in_->params[gather_group.params.front()]->name, counts_[group].data(), rounds ? uint32_t{ZR_COLL_WEIGHTS} : 0u));
}

void GatherScheduler::wait_for(uint32_t group) {
  GroupState& state = group_states_[group];
  if (state.state != State::gathering) return;
  state.done.wait();
  state.done = zr::Done();
  state.state = State::gathered;
}

void GatherScheduler::prefetch() {
  if (!order_.follows()) return;
  const auto& order = order_.order();
  for (next_ = std::max(next_, order_.at()); next_ < order.size(); ++next_) {
    const uint32_t group = order[next_];
    if (group_states_[group].state != State::absent) continue;
    if (prefetched_bytes_ + bytes(group) > limits_.prefetch) return;
    const int64_t when = order_.distance(group);
    while (!allocate(group))
      if (!drop_farthest(when)) return;
    group_states_[group].prefetched = true;
    prefetched_bytes_ += bytes(group);
    start(group, rounds_);
  }
}

void GatherScheduler::wait() {
  for (const uint32_t group : std::vector<uint32_t>(gathered_groups_)) wait_for(group);
}

void GatherScheduler::pass_end() {
  wait();
  const size_t at = order_.at();
  if (order_.follows() && at > 0 && at < order_.order().size()) order_changed(order_.order()[at]);  // ended early
  order_.end();
  next_ = 0;
}

void GatherScheduler::refresh() {
  for (const uint32_t group : std::vector<uint32_t>(gathered_groups_)) {
    if (group_states_[group].users > 0)
      throw zr::PluginError(ZR_INVALID,
                            std::string("weights changed while '") +
                                in_->params[groups_.groups()[group].params.front()]->name +
                                "' was in use; end the zr::gather scope before engine.step() or engine.set()");
    drop(group);
  }
}

}  // namespace zero3
