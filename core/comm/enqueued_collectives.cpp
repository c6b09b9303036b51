#include "comm/enqueued_collectives.hpp"

#include <utility>

namespace zr::host::comm {

void EnqueuedCollectives::add(DeviceMemory& device) {
  std::unique_ptr<DeviceMemory::Mark> unused;
  {
    const MutexLock lock(mutex_);
    if (!unused_.empty()) {
      unused = std::move(unused_.back());
      unused_.pop_back();
    }
  }
  std::unique_ptr<DeviceMemory::Mark> mark = device.mark(std::move(unused));  // without the lock: it may wait
  if (!mark) return;
  const Clock::time_point now = Clock::now();
  {
    const MutexLock lock(mutex_);
    if (marks_.empty()) oldest_ = now.time_since_epoch().count();
    marks_.push_back({std::move(mark), now});
  }
  if (!thread_.joinable()) thread_ = std::jthread([this](const std::stop_token& stop) { ask(stop); });
}

EnqueuedCollectives::Clock::duration EnqueuedCollectives::age() const {
  const Clock::rep oldest = oldest_;
  return oldest == 0 ? Clock::duration::zero() : Clock::now().time_since_epoch() - Clock::duration(oldest);
}

void EnqueuedCollectives::clear() {
  thread_ = {};
  const MutexLock lock(mutex_);
  marks_.clear();
  unused_.clear();
  oldest_ = 0;
}

void EnqueuedCollectives::ask(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    DeviceMemory::Mark* first = nullptr;  // only this thread removes marks, and clear() ends it first
    {
      const MutexLock lock(mutex_);
      if (!marks_.empty()) first = marks_.front().mark.get();
    }
    if (!first || !first->is_reached()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      continue;
    }
    const MutexLock lock(mutex_);
    unused_.push_back(std::move(marks_.front().mark));
    marks_.pop_front();
    oldest_ = marks_.empty() ? 0 : marks_.front().since.time_since_epoch().count();
  }
}

}  // namespace zr::host::comm
