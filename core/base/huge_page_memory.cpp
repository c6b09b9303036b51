#include "base/huge_page_memory.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "base/round_up.hpp"

namespace zr::host {

namespace {
// Maps memory instead of using the heap, which may return memory that was touched in small pages before. Without
// MAP_NORESERVE the kernel fails at once if the machine does not have that much memory (vm.overcommit_memory).
HugePageMemory map(uint64_t bytes, uint64_t align) {
  const uint64_t rounded = round_up(bytes, kPageBytes);
  void* mapping = ::mmap(nullptr, rounded + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(mapping);
  const uint64_t skip = (align - reinterpret_cast<uintptr_t>(start) % align) % align;
  if (skip) ::munmap(start, skip);
  ::munmap(start + skip + rounded, align - skip);
  ::madvise(start + skip, rounded / kHugePageBytes * kHugePageBytes, MADV_HUGEPAGE);
  return {start + skip, HugePageDeleter{rounded}};
}
}  // namespace

void HugePageDeleter::operator()(char* memory) const {
  if (mapped) {
    ::munmap(memory, mapped);
  } else {
    ::operator delete(memory, align);
  }
}

HugePageMemory allocate_huge_pages(int64_t bytes, int64_t align) {
  if (bytes >= kHugePageBytes)
    return map(static_cast<uint64_t>(bytes), static_cast<uint64_t>(std::max(align, kHugePageBytes)));
  const HugePageDeleter free{0, std::align_val_t(static_cast<std::size_t>(std::max(align, kPageBytes)))};
  return {static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), free.align, std::nothrow)), free};
}

}  // namespace zr::host
