// Arrays for kernels under test: an access outside ends the process or changes bytes that holds_its_guards() compares.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace zr::test {

/// Where an array lies.
enum class Place {
  aligned,       // begins at a multiple of 64 bytes
  end_of_page,   // ends where memory ends; may be misaligned for vectors
  odd_elements,  // begins one element after a multiple of 64 bytes
};

/// Where the arrays of a call lie: all at `place`, but one.
struct Layout {
  Place place;
  int odd_array = -1;  // begins one element after a multiple of 64 bytes
  Place of(int array) const { return array == odd_array ? Place::odd_elements : place; }
};

template <class T>
class GuardedArray {
 public:
  /// `element`: bytes of an element, if a T is a part of one.
  GuardedArray(const std::vector<T>& values, Place place, std::size_t element = sizeof(T)) : count_(values.size()) {
    constexpr std::size_t kPage = 4096;
    const std::size_t bytes = count_ * sizeof(T);
    size_ = (bytes + 2 * kGuard + kPage - 1) / kPage * kPage + kPage;
    void* const memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
    base_ = static_cast<unsigned char*>(memory);
    usable_ = size_ - kPage;
    mprotect(base_ + usable_, kPage, PROT_NONE);
    std::memset(base_, kFill, usable_);
    const std::size_t at =
        place == Place::end_of_page ? usable_ - bytes : kGuard + (place == Place::odd_elements ? element : 0);
    begin_ = base_ + at;
    if (count_ > 0) std::memcpy(begin_, values.data(), bytes);
  }
  ~GuardedArray() { munmap(base_, size_); }
  GuardedArray(const GuardedArray&) = delete;

  T* data() { return reinterpret_cast<T*>(begin_); }
  std::vector<T> values() const {
    std::vector<T> values(count_);
    if (count_ > 0) std::memcpy(values.data(), begin_, count_ * sizeof(T));
    return values;
  }
  /// True if nothing around the array was written.
  bool holds_its_guards() const {
    const auto is_fill = [](unsigned char byte) { return byte == kFill; };
    return std::all_of(base_, begin_, is_fill) && std::all_of(begin_ + count_ * sizeof(T), base_ + usable_, is_fill);
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kFill = 0xA5;
  std::size_t count_, size_ = 0, usable_ = 0;
  unsigned char *base_ = nullptr, *begin_ = nullptr;
};

}  // namespace zr::test
