// Memory that disks and large updates use: it begins at a page, and is of large pages where they fit. A disk, of a
// virtual machine above all, moves blocks in large pages faster (measured by the benchmark of disks).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace zr::host {

constexpr int64_t kPageBytes = 4096, kHugePageBytes = int64_t{2} << 20;

struct HugePageDeleter {
  std::size_t mapped = 0;  // bytes that are the kernel's to take back; 0: from the heap
  std::align_val_t align{kPageBytes};
  void operator()(char* memory) const;  // gives it back
};
using HugePageMemory = std::unique_ptr<char, HugePageDeleter>;

/// `bytes` (1 or more) at a multiple of `align`, a power of two, and of kPageBytes at least. From kHugePageBytes on
/// fresh from the kernel: zeros, not touched yet, and of large pages as far as whole ones reach and the kernel has
/// them. Null if there is no memory. Any thread.
HugePageMemory allocate_huge_pages(int64_t bytes, int64_t align = kPageBytes);

}  // namespace zr::host
