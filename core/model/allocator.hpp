// Counts libtorch's CPU memory: activations, gradients in progress, temporaries, batches. One count per process.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>

namespace zr::host::model {

/// [any]
class TorchMemory {
 public:
  /// From now on counts libtorch's allocations and releases; memory that was allocated before is never counted.
  /// Idempotent.
  static void count();
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
