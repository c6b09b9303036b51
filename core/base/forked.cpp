#include "base/forked.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>
#include <vector>

#include "zr/mutex.hpp"

namespace zr::host {

namespace {
std::atomic<uint64_t> g_depth{0};

// fork() holds the mutex, so that a child's copy is consistent.
struct Descriptors {
  Mutex mutex;
  std::vector<int> open ZR_GUARDED_BY(mutex);
};
Descriptors& descriptors() {
  static auto* all = new Descriptors;  // never destroyed: locks may be released after static objects are destroyed
  return *all;
}

// The three functions run around fork(), so no scope can hold the mutex.
void before_fork() ZR_NO_THREAD_SAFETY_ANALYSIS { descriptors().mutex.lock(); }
void after_fork_in_parent() ZR_NO_THREAD_SAFETY_ANALYSIS { descriptors().mutex.unlock(); }
void after_fork_in_child() ZR_NO_THREAD_SAFETY_ANALYSIS {
  for (const int fd : descriptors().open) ::close(fd);
  descriptors().open.clear();
  ++g_depth;
  descriptors().mutex.unlock();
}

// When the library is loaded: the process may fork before it opens the first descriptor.
[[maybe_unused]] const int g_registered = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}  // namespace

uint64_t fork_depth() { return g_depth.load(std::memory_order_relaxed); }

OwnDescriptor::OwnDescriptor(const std::function<int()>& open) {
  Descriptors& all = descriptors();
  const MutexLock lock(all.mutex);
  fd_ = open();
  const int error = errno;
  if (fd_ >= 0) all.open.push_back(fd_);
  errno = error;  // of open()
}

OwnDescriptor::~OwnDescriptor() {
  if (fd_ < 0 || owner_.is_parent()) return;
  Descriptors& all = descriptors();
  const MutexLock lock(all.mutex);
  std::erase(all.open, fd_);
  ::close(fd_);
}

OwnDescriptor::OwnDescriptor(OwnDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_) {}

}  // namespace zr::host
