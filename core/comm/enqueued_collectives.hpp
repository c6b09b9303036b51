// Collectives on a device that its stream may not have done yet: how long the oldest one has been enqueued.
#pragma once

#include <chrono>
#include <deque>
#include <memory>

#include "base/device_memory.hpp"
#include "zr/mutex.hpp"

namespace zr::host::comm {

/// Any thread.
class EnqueuedCollectives {
 public:
  using Clock = std::chrono::steady_clock;
  /// Adds what the stream of the device contains now.
  void add(DeviceMemory& device) {
    const MutexLock lock(mutex_);
    drop_done();
    std::unique_ptr<DeviceMemory::Mark> mark = device.mark(std::move(unused_));
    if (mark) marks_.push_back({std::move(mark), Clock::now()});
  }
  /// The time since the oldest one was added that is not done; 0 if all are.
  Clock::duration age() {
    const MutexLock lock(mutex_);
    drop_done();
    return marks_.empty() ? Clock::duration::zero() : Clock::now() - marks_.front().since;
  }
  void clear() {  // forgets all
    const MutexLock lock(mutex_);
    marks_.clear();
    unused_.reset();
  }

 private:
  struct Enqueued {
    std::unique_ptr<DeviceMemory::Mark> mark;
    Clock::time_point since;
  };
  void drop_done() ZR_REQUIRES(mutex_) {
    for (; !marks_.empty() && marks_.front().mark->is_reached(); marks_.pop_front())
      unused_ = std::move(marks_.front().mark);
  }
  Mutex mutex_;
  std::deque<Enqueued> marks_ ZR_GUARDED_BY(mutex_);
  std::unique_ptr<DeviceMemory::Mark> unused_ ZR_GUARDED_BY(mutex_);  // to be used again
};

}  // namespace zr::host::comm
