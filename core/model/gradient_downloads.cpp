#include "model/gradient_downloads.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host::model {

namespace {
// An eighth of a backward: the device stays busy while the oldest gradients are delivered. More than kMost would only
// take pinned memory.
int64_t limit_of(int64_t bytes_of_backward) {
  constexpr int64_t kMost = int64_t{128} << 20;
  return std::min(bytes_of_backward / 8, kMost);
}

// One per device, because libtorch's API cannot give a stream back.
c10::Stream download_stream(at::Device device) {
  static auto* mutex = new Mutex;
  static auto* streams = new std::map<std::string, c10::Stream>;
  const MutexLock lock(*mutex);
  const auto at = streams->find(device.str());
  if (at != streams->end()) return at->second;
  return streams->emplace(device.str(), c10::impl::VirtualGuardImpl(device.type()).getNewStream(device)).first->second;
}
}  // namespace

GradientDownloads::GradientDownloads(at::Device device, int64_t bytes_of_backward, Deliver deliver)
    : device_(device),
      stream_(download_stream(device)),
      limit_(limit_of(bytes_of_backward)),
      deliver_(std::move(deliver)) {}

GradientDownloads::~GradientDownloads() {
  drop();
  stop_thread();
}

void GradientDownloads::deliver_on_thread(bool on) {
  if (on == thread_.has_value()) return;
  if (!on) return stop_thread();
  thread_ = thread_without_signals([this] { run(); });
}

void GradientDownloads::stop_thread() {
  if (!thread_) return;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_->join();
  thread_.reset();
  const MutexLock lock(mutex_);
  stopping_ = false;
}

void GradientDownloads::throw_failure() {
  const MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void GradientDownloads::add(uint32_t param, const at::Tensor& gradient) {
  throw_failure();
  const at::NoGradGuard no_grad;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const at::Tensor values = gradient.contiguous();
  c10::Event computed(device_.type());
  computed.record(guard.getStream(device_));
  computed.block(stream_);
  at::Tensor on_host = at::empty(values.sizes(), at::TensorOptions().dtype(values.scalar_type()).pinned_memory(true));
  c10::Event complete(device_.type());
  {
    const c10::StreamGuard scope(stream_);
    on_host.copy_(values, true);
    guard.recordDataPtrOnStream(values.storage().data_ptr(), stream_);  // its memory is not reused before the copy
    complete.record(stream_);
  }
  MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  bytes_ += static_cast<int64_t>(on_host.nbytes());
  copies_.push_back({param, std::move(on_host), std::move(complete)});
  if (thread_) {
    changed_.notify_all();
    changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return !is_full() || failure_; });
    return;
  }
  while (is_full()) {
    const Copy copy = pop_oldest();
    lock.unlock();
    copy.complete.synchronize();
    deliver_(copy.param, copy.on_host);
    lock.lock();
  }
}

GradientDownloads::Copy GradientDownloads::pop_oldest() {
  Copy copy = std::move(copies_.front());
  copies_.pop_front();
  bytes_ -= static_cast<int64_t>(copy.on_host.nbytes());
  return copy;
}

void GradientDownloads::run() {
  c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
  MutexLock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return stopping_ || !copies_.empty(); });
    if (copies_.empty()) return;
    delivering_ = true;
    {
      const Copy copy = pop_oldest();
      const bool failed = failure_ != nullptr;  // the gradients after a failure are not delivered
      lock.unlock();
      changed_.notify_all();
      try {
        copy.complete.synchronize();
        if (!failed) deliver_(copy.param, copy.on_host);
      } catch (...) {
        lock.lock();
        if (!failure_) failure_ = std::current_exception();
        lock.unlock();
      }
    }
    lock.lock();
    delivering_ = false;
    changed_.notify_all();
  }
}

void GradientDownloads::finish() {
  if (thread_) {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return copies_.empty() && !delivering_; });
  }
  throw_failure();
  MutexLock lock(mutex_);
  while (!copies_.empty()) {
    const Copy copy = pop_oldest();
    lock.unlock();
    copy.complete.synchronize();
    deliver_(copy.param, copy.on_host);
    lock.lock();
  }
}

void GradientDownloads::drop() {
  std::deque<Copy> dropped;
  {
    MutexLock lock(mutex_);
    dropped.swap(copies_);
    bytes_ = 0;
    changed_.notify_all();
    changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return !delivering_; });
    failure_ = nullptr;
  }
  for (Copy& copy : dropped) try {
      copy.complete.synchronize();
    } catch (const std::exception& failure) {  // of the device; destructors call drop()
      log(ZR_LOG_ERROR, first_line(failure.what()));
      return;
    }
}

}  // namespace zr::host::model
