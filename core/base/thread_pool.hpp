// The rank's own threads, for the tile pipeline and for plug-ins. Autograd has libtorch's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace zr::host {

class ThreadPool {
 public:
  /// `width` threads in all: the caller of parallel_for is one of them.
  explicit ThreadPool(int width);
  ~ThreadPool();
  int width() const { return width_; }
  /// Runs fn(begin, end) over [0, n), cut into at most width() runs of at least `grain`; returns when all ran and
  /// rethrows the first exception. One caller at a time.
  void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn);

 private:
  struct Threads;
  int width_;
  std::unique_ptr<Threads> threads_;
};

}  // namespace zr::host
