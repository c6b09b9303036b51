// Collectives on a device that its stream may not have done yet: since when the oldest one has been enqueued.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "base/device_memory.hpp"
#include "zr/mutex.hpp"

namespace zr::host::comm {

/// A thread of its own asks the device, whose library may not answer while a stream is stuck.
class EnqueuedCollectives {
 public:
  using Clock = std::chrono::steady_clock;
  ~EnqueuedCollectives() { clear(); }
  /// Adds what the stream of the device contains now. The first call starts the thread. [use]
  void add(DeviceMemory& device);
  /// The time since the oldest one was added that is not known to be done; 0 if all are. Never waits. Any thread.
  Clock::duration age() const;
  /// Ends the thread and forgets all. [use]
  void clear();

 private:
  struct Enqueued {
    std::unique_ptr<DeviceMemory::Mark> mark;
    Clock::time_point since;
  };
  void ask(const std::stop_token& stop);
  Mutex mutex_;
  std::deque<Enqueued> marks_ ZR_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<DeviceMemory::Mark>> unused_ ZR_GUARDED_BY(mutex_);  // destroyed by clear() alone
  std::atomic<Clock::rep> oldest_{0};                                              // steady clock; 0: none
  std::jthread thread_;
};

}  // namespace zr::host::comm
