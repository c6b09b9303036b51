#include "base/thread_pool.hpp"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <exception>
#include <latch>

#include "zr/mutex.hpp"

namespace zr::host {

struct ThreadPool::Threads {
  explicit Threads(int n) : pool(static_cast<std::size_t>(n)) {}
  boost::asio::thread_pool pool;
};

ThreadPool::ThreadPool(int width) : width_(std::max(1, width)) {
  if (width_ > 1) threads_ = std::make_unique<Threads>(width_ - 1);
}

ThreadPool::~ThreadPool() {
  if (threads_) threads_->pool.join();
}

void ThreadPool::parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) {
  if (n <= 0) return;
  const int64_t ranges = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, width_);
  if (ranges == 1) return fn(0, n);
  std::latch finished(ranges - 1);
  Mutex mutex;
  std::exception_ptr first_exception;
  const auto begin_of = [&](int64_t i) { return static_cast<int64_t>(static_cast<__int128>(n) * i / ranges); };
  const auto run_range = [&](int64_t i) {
    try {
      fn(begin_of(i), begin_of(i + 1));
    } catch (...) {
      const MutexLock lock(mutex);
      if (!first_exception) first_exception = std::current_exception();
    }
  };
  for (int64_t i = 1; i < ranges; ++i)
    boost::asio::post(threads_->pool, [&run_range, &finished, i] {
      run_range(i);
      finished.count_down();
    });
  run_range(0);
  finished.wait();
  if (first_exception) std::rethrow_exception(first_exception);
}

}  // namespace zr::host
