// Mutexes that clang's thread-safety analysis checks (-Wthread-safety, run by `make lint`); with other compilers they
// are std::mutex. Source of the annotations: https://clang.llvm.org/docs/ThreadSafetyAnalysis.html
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
// An attribute for the analysis. The macros below use it.
#define ZR_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define ZR_THREAD_ATTRIBUTE(x)
#endif

/// Before a member: it is read and written only while `mutex` is held.
#define ZR_GUARDED_BY(mutex) ZR_THREAD_ATTRIBUTE(guarded_by(mutex))
/// After a pointer member: the object that it points to is used only while `mutex` is held.
#define ZR_POINTEE_GUARDED_BY(mutex) ZR_THREAD_ATTRIBUTE(pt_guarded_by(mutex))
/// After the parameters of a function or lambda: the caller holds these mutexes.
#define ZR_REQUIRES(...) ZR_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
/// After the parameters of a function: the caller does not hold these mutexes, because the function locks them.
#define ZR_EXCLUDES(...) ZR_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
/// After the parameters of a function: it returns with these mutexes held.
#define ZR_ACQUIRE(...) ZR_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
/// After the parameters of a function: it returns with these mutexes unlocked.
#define ZR_RELEASE(...) ZR_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
/// After the parameters of a function: the analysis skips its body. The comment beside it says why.
#define ZR_NO_THREAD_SAFETY_ANALYSIS ZR_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace zr {

/// A std::mutex. Any thread; it outlives its locks.
class ZR_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  /// Blocks until this thread holds the mutex.
  void lock() ZR_ACQUIRE() { mutex_.lock(); }
  /// Only the thread that holds the mutex may call this.
  void unlock() ZR_RELEASE() { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// A std::recursive_mutex: the thread that holds it may lock it again. Any thread; it outlives its locks.
class ZR_THREAD_ATTRIBUTE(capability("mutex")) RecursiveMutex {
 public:
  RecursiveMutex() = default;
  RecursiveMutex(const RecursiveMutex&) = delete;
  RecursiveMutex& operator=(const RecursiveMutex&) = delete;
  /// Blocks until this thread holds the mutex.
  void lock() ZR_ACQUIRE() { mutex_.lock(); }
  /// Only the thread that holds the mutex may call this, once for each lock().
  void unlock() ZR_RELEASE() { mutex_.unlock(); }

 private:
  std::recursive_mutex mutex_;
};

/// Holds a Mutex from its construction to its destruction, except between unlock() and lock(). One thread; the mutex
/// outlives it.
class ZR_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  /// Blocks until this thread holds `mutex`.
  explicit MutexLock(Mutex& mutex) ZR_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() ZR_RELEASE() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  /// Blocks until this thread holds the mutex again.
  void lock() ZR_ACQUIRE() { lock_.lock(); }
  /// Releases the mutex before the end of the scope.
  void unlock() ZR_RELEASE() { lock_.unlock(); }

 private:
  friend class ConditionVariable;
  std::unique_lock<std::mutex> lock_;
};

/// Holds a RecursiveMutex during a scope. One thread; the mutex outlives it.
class ZR_THREAD_ATTRIBUTE(scoped_lockable) RecursiveMutexLock {
 public:
  /// Blocks until this thread holds `mutex`.
  explicit RecursiveMutexLock(RecursiveMutex& mutex) ZR_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~RecursiveMutexLock() ZR_RELEASE() { mutex_.unlock(); }
  RecursiveMutexLock(const RecursiveMutexLock&) = delete;
  RecursiveMutexLock& operator=(const RecursiveMutexLock&) = delete;

 private:
  RecursiveMutex& mutex_;
};

/// A std::condition_variable for MutexLock. Any thread. A predicate that reads guarded members is written
/// `[&]() ZR_REQUIRES(mutex_) { return ...; }`; it is called with the mutex held.
class ConditionVariable {
 public:
  /// Wakes one waiting thread.
  void notify_one() noexcept { changed_.notify_one(); }
  /// Wakes all waiting threads.
  void notify_all() noexcept { changed_.notify_all(); }
  /// Unlocks, waits for a notification and locks again. May return without a notification.
  void wait(MutexLock& lock) { changed_.wait(lock.lock_); }
  /// Waits until `predicate()` is true.
  template <class Predicate>
  void wait(MutexLock& lock,
            Predicate predicate) ZR_NO_THREAD_SAFETY_ANALYSIS {  // it cannot see that `lock` holds the mutex
    changed_.wait(lock.lock_, predicate);
  }
  /// Waits until `predicate()` is true or `deadline` has passed; returns `predicate()`.
  template <class Clock, class Duration, class Predicate>
  bool wait_until(MutexLock& lock, const std::chrono::time_point<Clock, Duration>& deadline,
                  Predicate predicate) ZR_NO_THREAD_SAFETY_ANALYSIS {
    return changed_.wait_until(lock.lock_, deadline, predicate);
  }
  /// Waits until `predicate()` is true or `time` has passed; returns `predicate()`.
  template <class Rep, class Period, class Predicate>
  bool wait_for(MutexLock& lock, const std::chrono::duration<Rep, Period>& time,
                Predicate predicate) ZR_NO_THREAD_SAFETY_ANALYSIS {
    return changed_.wait_for(lock.lock_, time, predicate);
  }

 private:
  std::condition_variable changed_;
};

}  // namespace zr
