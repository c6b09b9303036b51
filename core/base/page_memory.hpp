// Memory that disks and large updates use: whole pages, and large ones where they fit. A disk, of a virtual
// machine above all, moves blocks in large pages faster: bench row nvme_large_pages.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace zr::host {

constexpr int64_t kPage = 4096, kLargePage = int64_t{2} << 20;

struct FreePages {
  std::align_val_t align{kPage};
  void operator()(char* memory) const { ::operator delete(memory, align); }
};
using PageMemory = std::unique_ptr<char, FreePages>;

/// `bytes` at a multiple of `align`, a power of two, and of kPage at least; from kLargePage on in large pages as far as
/// whole ones reach and the kernel has them. Null if there is no memory. Nothing of it was touched yet. Any thread.
PageMemory page_memory(int64_t bytes, int64_t align = kPage);

}  // namespace zr::host
