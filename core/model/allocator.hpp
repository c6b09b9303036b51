// Counts libtorch's CPU memory: activations, gradients in progress, temporaries, batches. One count per process. The C
// library reports the size of a block at allocation and release, which takes 6 ns of the 180 ns of a small tensor.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>

namespace zr::host::model {

/// libtorch's own CPU allocator, with counting.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

/// What has been allocated since ProcessSetup::count_cpu_memory(). [any]
class TorchMemory {
 public:
  /// True if this memory is counted, so that freeing it reduces held().
  static bool counts(const at::DataPtr& memory);
  /// Bytes that are allocated now, as the C library rounds them.
  static int64_t held();
  static int64_t peak();      // the maximum of held() since the last forget_peak()
  static void forget_peak();  // sets the peak to held()

  /// Before an allocation that would raise held() above `bytes`, calls over(requested) on the allocating thread; if it
  /// returns, the allocation is made. Replaces the previous limit. An empty `over` removes the limit.
  static void limit(int64_t bytes, std::function<void(int64_t requested)> over);
};

}  // namespace zr::host::model
