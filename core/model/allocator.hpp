// Libtorch's CPU memory, counted: activations, gradients under way, temporaries, batches. One per process.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>

namespace zr::host {

/// [any]
class TorchMemory {
 public:
  /// From now on libtorch's allocations are counted as they are made and freed; what was allocated before never is.
  /// Again: no effect.
  static void count();
  /// It is memory that is counted, and that freeing it gives back.
  static bool counts(const at::DataPtr& memory);
  /// Bytes that are allocated now, as the C library rounds them; the most since the last forget_peak().
  static int64_t held();
  static int64_t peak();      // as above
  static void forget_peak();  // the peak is what is held now

  /// Before more than `bytes` would be held, over(requested) is called, on the thread that asked; if it returns, the
  /// allocation is made. Replaces the limit before. No limit: empty `over`.
  static void limit(int64_t bytes, std::function<void(int64_t requested)> over);
};

}  // namespace zr::host
