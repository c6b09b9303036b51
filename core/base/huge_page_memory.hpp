// Memory for disk transfers and large updates: page-aligned, in huge pages where they fit. Disks, above all those of
// virtual machines, transfer blocks in huge pages faster (measured by the disk benchmark).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace zr::host {

constexpr int64_t kPageBytes = 4096, kHugePageBytes = int64_t{2} << 20;

struct HugePageDeleter {
  std::size_t mapped = 0;  // bytes to unmap; 0: from the heap
  std::align_val_t align{kPageBytes};
  void operator()(char* memory) const;  // frees the memory
};
using HugePageMemory = std::unique_ptr<char, HugePageDeleter>;

/// Allocates `bytes` (1 or more) at a multiple of `align` (a power of two) and of kPageBytes. From kHugePageBytes on,
/// the memory is mapped: zeroed, not touched yet, and in huge pages as far as complete ones fit and the kernel has
/// them. Null if allocation fails. Any thread.
HugePageMemory allocate_huge_pages(int64_t bytes, int64_t align = kPageBytes);

}  // namespace zr::host
