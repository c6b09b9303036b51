#include "conform/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "zr/mutex.hpp"

namespace zr::conform {

namespace {
constexpr char kSurroundings = '\x5b';

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}
std::size_t to_pages(std::size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }
}  // namespace

Pages::Pages(std::size_t bytes) : start_(nullptr), bytes_(std::max(to_pages(bytes), page_bytes())) {
  const std::size_t all = bytes_ + 2 * page_bytes();
  void* mapped = ::mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  start_ = static_cast<char*>(mapped) + page_bytes();
  if (::mprotect(start_, bytes_, PROT_READ | PROT_WRITE) != 0)
    throw std::system_error(errno, std::generic_category(), "mprotect");
}

Pages::~Pages() {
  if (start_) ::munmap(start_ - page_bytes(), bytes_ + 2 * page_bytes());
}

void Pages::withdraw() const {
  ::madvise(start_, bytes_, MADV_DONTNEED);
  ::mprotect(start_, bytes_, PROT_NONE);
}
void Pages::make_read_only() const { ::mprotect(start_, bytes_, PROT_READ); }

Array::Array(std::size_t bytes, std::size_t align, std::size_t shift)
    : pages_(bytes + align + shift), bytes_(bytes), data_(pages_.data() + pages_.bytes() - bytes) {
  data_ -= reinterpret_cast<uintptr_t>(data_) % align;
  data_ -= shift;
  std::memset(pages_.data(), kSurroundings, pages_.bytes());
}

bool Array::surroundings_are_intact() const {
  const auto intact = [](char c) { return c == kSurroundings; };
  return std::all_of(pages_.data(), data_, intact) &&
         std::all_of(data_ + bytes_, pages_.data() + pages_.bytes(), intact);
}

char* ArgumentMemory::allocate(std::size_t bytes) {
  if (!mode_.withdraw_arguments) return plain_.emplace_back(new char[bytes + 1]).get();
  Pages& pages = pages_.emplace_back(bytes);
  return pages.data() + (pages.bytes() - bytes) / 16 * 16;
}

ArgumentMemory::~ArgumentMemory() {
  if (pages_.empty()) return;
  static Mutex mutex;
  static auto* withdrawn = new std::vector<Pages>;  // never unmapped
  const MutexLock lock(mutex);
  for (Pages& pages : pages_) {
    pages.withdraw();
    withdrawn->push_back(std::move(pages));
  }
}

}  // namespace zr::conform
