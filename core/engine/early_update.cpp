#include "engine/early_update.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/thread_without_signals.hpp"

namespace zr::host::engine {

namespace {
constexpr const char* kTrack = "early update";  // of the worker, in the trace
}  // namespace

EarlyUpdate::EarlyUpdate(const job::StepContext& context, state::ShardedState& state,
                         std::vector<update::Optimizer> optimizers, Trace* trace)
    : context_(context),
      state_(state),
      optimizers_(std::move(optimizers)),
      trace_(trace),
      tiles_(state.states(), state.slices()),
      pool_(context.pool.width()),
      gradient_size_(size_of(context.plan.input.reduced_grad_dtype)),
      all_touched_(context.plan.input.parameters.size(), 1) {
  for (const offload::EarlyTiles::Tile& tile : tiles_.tiles()) add_group(true, tile.index, tile.slices);
  for (std::size_t i = 0; i < state.staged().size(); ++i) add_group(false, i, {state.staged()[i]});
  std::ranges::sort(parts_, {}, &GradientRange::gradients);
  updated_.tiles.assign(context.plan.placement.tiles.size(), 0);
  updated_.staged.assign(state.staged().size(), 0);
  tiles_.on_wait([this](bool writes, Trace::Time begin) { record(writes ? Work::write : Work::read, begin, kTrack); });
  worker_ = thread_without_signals([this] { work(); });
}

EarlyUpdate::~EarlyUpdate() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  worker_.join();
}

void EarlyUpdate::add_group(bool on_disk, std::size_t index, const std::vector<update::UpdateSlice>& slices) {
  UpdateGroup group{on_disk, index, slices};
  const MutexLock lock(mutex_);
  for (const update::UpdateSlice& slice : slices) {
    if (slice.count == 0) continue;
    const int64_t lead = slice.first % plan::kNormBlock, blocks = plan::norm_blocks_of(lead + slice.count);
    parts_.push_back({bytes_of(slice.grad), slice.count, groups_.size(), uses_.size(), lead});
    uses_.resize(uses_.size() + static_cast<std::size_t>(blocks));
    group.elements += slice.count;
    group.bytes += context_.plan.state_bytes(slice.state_offset, slice.count);
    group.blocks += blocks;
  }
  elements_ += group.elements;
  groups_.push_back(std::move(group));
}

void EarlyUpdate::begin(Input input, std::function<bool(uint32_t param)> touches) {
  const MutexLock lock(mutex_);
  input_ = std::move(input);
  update_input_ = {input_.grad_mul, input_.number, 0, &input_.steps, &input_.rates, &all_touched_};
  update_input_.keeps_weights = true;
  touches_ = std::move(touches);
  for (UpdateGroup& group : groups_) {
    group.missing = group.blocks;
    group.is_updated = group.is_ready = false;
  }
  ready_.clear();
  taken_ = 0;
  parts_updated_ = 0;
  was_used_late_ = false;
  is_active_ = true;
  is_stopped_ = false;
  is_reading_ahead_ = is_recorded_;
  changed_.notify_all();
}

// Calls fn(uses, group) for the norm blocks that overlap `bytes` of reduced gradients from `first` on. A tile may begin
// inside a norm block.
template <class F>
void EarlyUpdate::for_each_block(const void* first, int64_t bytes, const F& fn) {
  const char *begin = static_cast<const char*>(first), *end = begin + bytes;
  auto at = std::ranges::upper_bound(parts_, begin, {}, &GradientRange::gradients);
  if (at != parts_.begin()) --at;
  for (; at != parts_.end() && at->gradients < end; ++at) {
    const int64_t from = std::max<int64_t>(begin - at->gradients, 0) / gradient_size_,
                  to = std::min<int64_t>((end - at->gradients) / gradient_size_, at->elements);
    if (from >= to) continue;
    for (int64_t i = (at->lead + from) / plan::kNormBlock; i < plan::norm_blocks_of(at->lead + to); ++i)
      fn(uses_[at->first_block + static_cast<std::size_t>(i)], at->group);
  }
}

// Counts a use of a block; if it is the last one that is expected, the block is final.
void EarlyUpdate::use(Uses& uses, std::size_t index) {
  UpdateGroup& group = groups_[index];
  ++uses.in_this_step;
  if (!is_recorded_) {
    ++uses.in_first_step;
    group.last_use = ++last_use_;
    return;
  }
  if (uses.in_this_step > uses.in_first_step) was_used_late_ |= group.is_ready;
  if (uses.in_this_step != uses.in_first_step || --group.missing > 0) return;
  const bool touched = std::ranges::all_of(
      group.slices, [&](const update::UpdateSlice& slice) ZR_REQUIRES(mutex_) { return touches_(slice.param); });
  if (!touched || is_stopped_) return;
  group.is_ready = true;
  ready_.push_back(index);
}

void EarlyUpdate::gradients_reduced(const void* first, int64_t elements, bool finite) {
  const MutexLock lock(mutex_);
  if (!is_active_) return;
  is_stopped_ |= !finite;
  for_each_block(first, elements * gradient_size_,
                 [&](Uses& uses, std::size_t group) ZR_REQUIRES(mutex_) { use(uses, group); });
  changed_.notify_all();
}

// Blocks that were not reduced yet are operands of their reduction.
void EarlyUpdate::collective_read(const zr_view& memory) {
  const MutexLock lock(mutex_);
  if (!is_active_ || memory.count == 0) return;
  for_each_block(memory.data, memory.count * size_of(memory.dtype),
                 [&](Uses& uses, std::size_t group) ZR_REQUIRES(mutex_) {
                   if (uses.in_this_step > 0) use(uses, group);
                 });
  changed_.notify_all();
}

// Reads the tiles that are expected next, as far as there is staging memory.
void EarlyUpdate::read_ahead() {
  for (const std::size_t group : order_)
    if (groups_[group].on_disk && !groups_[group].is_updated && !tiles_.read_ahead(groups_[group].index)) return;
}

void EarlyUpdate::update(UpdateGroup& group, ThreadPool& pool, const char* track) {
  const auto update = [&](const std::vector<update::UpdateSlice>& slices) {
    const auto begin = Trace::Time::clock::now();
    update::update(optimizers_, pool, context_.plan, slices, update_input_);
    record(Work::update, begin, track);
  };
  group.on_disk ? tiles_.update(group.index, update) : update(group.slices);
  group.is_updated = true;
}

void EarlyUpdate::record(Work work, Trace::Time begin, const char* track) {
  static constexpr const char* kNames[] = {"update", "wait: read", "wait: write"};
  const auto end = Trace::Time::clock::now();
  {
    const MutexLock lock(mutex_);
    seconds_[static_cast<std::size_t>(work)] += std::chrono::duration<double>(end - begin).count();
    if (work != Work::update && blocks_since_ && end > *blocks_since_)
      (work == Work::read ? blocked_.read : blocked_.write) +=
          std::chrono::duration<double>(end - std::max(begin, *blocks_since_)).count();
  }
  if (trace_) trace_->span(track, kNames[static_cast<std::size_t>(work)], begin, end);
}

void EarlyUpdate::work() {
  MutexLock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) {
      return ends_ || task_ || (!is_stopped_ && (is_reading_ahead_ || taken_ < ready_.size()));
    });
    if (ends_) return;
    is_busy_ = true;
    const bool begins = std::exchange(is_reading_ahead_, false);
    const std::function<void()> task = std::exchange(task_, {});
    UpdateGroup* const group = !task && taken_ < ready_.size() ? &groups_[ready_[taken_++]] : nullptr;
    lock.unlock();
    const std::exception_ptr failure = exception_of([&] {
      if (begins) tiles_.begin();
      if (task) task();
      if (group) update(*group, pool_, kTrack);
      if (!task) read_ahead();
    });
    lock.lock();
    is_busy_ = false;
    if (group || failure) ended_locked(failure);
    changed_.notify_all();
  }
}

// The update of a group has ended, or the worker failed.
void EarlyUpdate::ended_locked(const std::exception_ptr& failure) {
  parts_updated_ += !failure;
  if (!failure) return;
  if (!failure_) failure_ = failure;
  is_stopped_ = true;
}

// Updates groups in host memory on the training thread: those that the worker would take last.
void EarlyUpdate::help() {
  MutexLock lock(mutex_);
  while (!is_stopped_) {
    const auto last = std::find_if(ready_.rbegin(), ready_.rend() - static_cast<std::ptrdiff_t>(taken_),
                                   [&](std::size_t i) { return !groups_[i].on_disk; });
    if (last == ready_.rend() - static_cast<std::ptrdiff_t>(taken_)) return;
    UpdateGroup& group = groups_[*last];
    ready_.erase(std::prev(last.base()));
    lock.unlock();
    const std::exception_ptr failure =
        exception_of([&] { update(group, context_.pool, "early update, training thread"); });
    lock.lock();
    ended_locked(failure);
  }
}

void EarlyUpdate::finish() {
  {
    const MutexLock lock(mutex_);
    if (!is_active_) return;
  }
  help();
  MutexLock lock(mutex_);
  blocks_since_ = Trace::Time::clock::now();
  changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return !is_busy_ && (is_stopped_ || taken_ == ready_.size()); });
  is_active_ = is_reading_ahead_ = false;  // the worker begins nothing
  lock.unlock();
  tiles_.end();
  lock.lock();
  blocks_since_.reset();
  state_.states().add_waits(std::exchange(blocked_, {}));
  reset_uses();
  if (!std::exchange(is_recorded_, true)) {
    order_.resize(groups_.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::ranges::sort(order_, {}, [&](std::size_t group) { return groups_[group].last_use; });
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  if (was_used_late_)
    fail_internal(fmt::format(
        "{}: it used reduced gradients in more collectives than in the first step; set offload.overlap = false",
        context_.strategy.call_text("grad_ready")));
}

std::exception_ptr EarlyUpdate::abandon() {
  MutexLock lock(mutex_);
  if (!is_active_) return nullptr;
  is_stopped_ = true;
  changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return !is_busy_; });
  is_active_ = is_reading_ahead_ = false;
  lock.unlock();
  tiles_.end();
  lock.lock();
  reset_uses();
  if (!is_recorded_) std::ranges::fill(uses_, Uses{});
  return std::exchange(failure_, nullptr);
}

void EarlyUpdate::forget_order() {
  const MutexLock lock(mutex_);
  is_recorded_ = false;
  std::ranges::fill(uses_, Uses{});
}

int64_t EarlyUpdate::elements_updated() const {
  int64_t elements = 0;
  for (const UpdateGroup& group : groups_) elements += group.is_updated ? group.elements : 0;
  return elements;
}

void EarlyUpdate::reset_uses() {
  for (Uses& uses : uses_) uses.in_this_step = 0;
}

// Calls fn on the training thread's pool and on the worker's, each with about half of the elements.
void EarlyUpdate::run_on_both(const std::vector<update::UpdateSlice>& slices,
                              const std::function<void(ThreadPool&, const std::vector<update::UpdateSlice>&)>& fn) {
  std::vector<update::UpdateSlice> halves[2];
  int64_t all = 0, given = 0;
  for (const update::UpdateSlice& slice : slices) all += slice.count;
  for (const update::UpdateSlice& slice : slices) {
    halves[2 * given < all ? 0 : 1].push_back(slice);
    given += slice.count;
  }
  MutexLock lock(mutex_);
  task_ = [&] { fn(pool_, halves[1]); };
  changed_.notify_all();
  lock.unlock();
  std::exception_ptr failure = exception_of([&] { fn(context_.pool, halves[0]); });
  lock.lock();
  changed_.wait(lock,
                [&]() ZR_REQUIRES(mutex_) { return !task_ && !is_busy_; });  // the task refers to this function's data
  if (!failure) failure = std::exchange(failure_, nullptr);
  if (failure) std::rethrow_exception(failure);
}

double EarlyUpdate::seconds(Work work) const {
  const MutexLock lock(mutex_);
  return seconds_[static_cast<std::size_t>(work)];
}

int64_t EarlyUpdate::parts_updated() const {
  const MutexLock lock(mutex_);
  return parts_updated_;
}

const state::ShardedState::Updated& EarlyUpdate::adopt() {
  std::vector<update::UpdateSlice> slices;
  elements_early_ = bytes_early_ = 0;
  for (const UpdateGroup& group : groups_) {
    (group.on_disk ? updated_.tiles : updated_.staged)[group.index] = group.is_updated;
    if (!group.is_updated) continue;
    elements_early_ += group.elements;
    bytes_early_ += group.bytes;
    slices.insert(slices.end(), group.slices.begin(), group.slices.end());
  }
  if (!slices.empty())
    run_on_both(slices, [&](ThreadPool& pool, const std::vector<update::UpdateSlice>& half) {
      update::adopt_weights(pool, context_.plan, half, update_input_);
    });
  return updated_;
}

}  // namespace zr::host::engine
