#include "base/page_memory.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace zr::host {

PageMemory page_memory(int64_t bytes, int64_t align) {
  const int64_t at_least = bytes >= kLargePage ? kLargePage : kPage;
  const auto step = std::align_val_t(static_cast<std::size_t>(std::max(align, at_least)));
  PageMemory memory(static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), step, std::nothrow)),
                    FreePages{step});
  const int64_t large = bytes / kLargePage * kLargePage;
  if (memory && large > 0) ::madvise(memory.get(), static_cast<std::size_t>(large), MADV_HUGEPAGE);
  return memory;
}

}  // namespace zr::host
