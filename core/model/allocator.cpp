#include "model/allocator.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "zr/mutex.hpp"

namespace zr::host::model {

namespace {
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

std::atomic<int64_t> held_bytes{0}, peak_bytes{0}, limit_bytes{kNone};

// What is called before an allocation that would exceed the limit; empty: nothing.
struct OverLimit {
  Mutex mutex;
  std::shared_ptr<const std::function<void(int64_t)>> callback ZR_GUARDED_BY(mutex);
  static OverLimit& get() {
    static auto* over_limit = new OverLimit;  // tensors may be freed after static destructors ran
    return *over_limit;
  }
};

// The size that the C library allocated. It returns the same size at release, so sizes are not stored.
int64_t size_of_block(void* data) { return static_cast<int64_t>(::malloc_usable_size(data)); }

void free_counted(void* data) {
  if (!data) return;
  held_bytes.fetch_sub(size_of_block(data), std::memory_order_relaxed);
  c10::profiledCPUMemoryReporter().Delete(data);
  c10::free_cpu(data);
}

void report_over_limit(int64_t requested) {
  OverLimit& over_limit = OverLimit::get();
  std::shared_ptr<const std::function<void(int64_t)>> callback;
  {
    const MutexLock lock(over_limit.mutex);
    callback = over_limit.callback;
  }
  if (callback) (*callback)(requested);
}
}  // namespace

c10::DataPtr CountingAllocator::allocate(std::size_t bytes) {
  const auto requested = static_cast<int64_t>(bytes);
  if (held_bytes.load(std::memory_order_relaxed) + requested > limit_bytes.load(std::memory_order_relaxed))
    report_over_limit(requested);
  void* data = c10::alloc_cpu(bytes);
  if (data) {
    const int64_t size = size_of_block(data), held = held_bytes.fetch_add(size, std::memory_order_relaxed) + size;
    for (int64_t peak = peak_bytes.load(std::memory_order_relaxed);
         held > peak && !peak_bytes.compare_exchange_weak(peak, held, std::memory_order_relaxed);) {
    }
  }
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return {data, data, &free_counted, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr CountingAllocator::raw_deleter() const { return &free_counted; }

bool TorchMemory::counts(const at::DataPtr& memory) { return memory.get_deleter() == &free_counted; }

int64_t TorchMemory::held() { return held_bytes.load(std::memory_order_relaxed); }
int64_t TorchMemory::peak() { return std::max(peak_bytes.load(std::memory_order_relaxed), held()); }
void TorchMemory::forget_peak() { peak_bytes.store(held(), std::memory_order_relaxed); }

void TorchMemory::limit(int64_t bytes, std::function<void(int64_t requested)> over) {
  OverLimit& over_limit = OverLimit::get();
  const MutexLock lock(over_limit.mutex);
  limit_bytes.store(over ? bytes : kNone, std::memory_order_relaxed);
  over_limit.callback = over ? std::make_shared<const std::function<void(int64_t)>>(std::move(over)) : nullptr;
}

}  // namespace zr::host::model
