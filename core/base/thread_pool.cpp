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
  const int64_t runs = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, width_);
  if (runs == 1) return fn(0, n);
  std::latch finished(runs - 1);
  Mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int64_t i) {
    try {
      fn(n * i / runs, n * (i + 1) / runs);
    } catch (...) {
      const MutexLock lock(mutex);
      if (!first) first = std::current_exception();
    }
  };
  for (int64_t i = 1; i < runs; ++i)
    boost::asio::post(threads_->pool, [&run, &finished, i] {
      run(i);
      finished.count_down();
    });
  run(0);
  finished.wait();
  if (first) std::rethrow_exception(first);
}

}  // namespace zr::host
