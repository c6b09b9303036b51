// The rank's thread pool, for optimizer tiles and for plug-ins. Autograd uses libtorch's threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace zr::host {

class ThreadPool {
 public:
  /// `width` threads in total, the caller of parallel_for included.
  explicit ThreadPool(int width);
  ~ThreadPool();
  int width() const { return width_; }
  /// Runs fn(begin, end) over [0, n), cut into at most width() ranges of at least `grain`; returns when all have run,
  /// and rethrows the first exception. Any thread, but not inside `fn`.
  void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn);

 private:
  struct Threads;
  int width_;
  std::unique_ptr<Threads> threads_;
};

}  // namespace zr::host
