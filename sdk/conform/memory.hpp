// Memory that shows what a plug-in does with it: guard pages, known content, arguments that disappear.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "conform/case.hpp"
#include "zr/abi/base.h"

namespace zr::conform {

/// Pages between two pages that cannot be accessed. Never reused, so that a late access crashes.
class Pages {
 public:
  explicit Pages(std::size_t bytes);
  ~Pages();
  Pages(Pages&& other) noexcept : start_(other.start_), bytes_(other.bytes_) { other.start_ = nullptr; }
  Pages(const Pages&) = delete;
  /// The first byte, at a page boundary, and the number of bytes, a multiple of the page size.
  char* data() const { return start_; }
  std::size_t bytes() const { return bytes_; }
  /// From now on an access crashes.
  void withdraw() const;
  /// From now on a write crashes.
  void make_read_only() const;

 private:
  char* start_;
  std::size_t bytes_;
};

/// Elements between bytes of known content. They end just before a guard page, or as near to it as `align` permits.
class Array {
 public:
  /// `shift`: bytes by which the elements are moved away from the guard page, and out of their alignment.
  explicit Array(std::size_t bytes, std::size_t align = 64, std::size_t shift = 0);
  char* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  std::string content() const { return {data_, bytes_}; }
  void fill(const std::string& content) const { std::memcpy(data_, content.data(), content.size()); }
  /// False if a byte before or after the elements has been written.
  bool surroundings_are_intact() const;
  void make_read_only() const { pages_.make_read_only(); }

 private:
  Pages pages_;
  std::size_t bytes_;
  char* data_;
};

/// The arguments of one call. The copies live as long as the arguments; with Mode::withdraw_arguments, each is on a
/// page of its own that cannot be read after the arguments has ended.
class ArgumentMemory {
 public:
  explicit ArgumentMemory(const Mode& mode) : mode_(mode) {}
  ~ArgumentMemory();
  ArgumentMemory(const ArgumentMemory&) = delete;
  /// A sized struct; with Mode::longer_structs, it has unknown bytes after its members.
  template <class T>
  T* sized(T value) {
    const std::size_t extra = mode_.longer_structs ? kUnknownBytes : 0;
    value.size = static_cast<uint32_t>(sizeof value + extra);
    char* at = allocate(sizeof value + extra);
    std::memcpy(at, &value, sizeof value);
    if (extra) std::memset(at + sizeof value, 0xa5, extra);
    return reinterpret_cast<T*>(at);
  }
  /// A list, or NULL if it is empty.
  template <class T>
  const T* list(const std::vector<T>& values) {
    if (values.empty()) return nullptr;
    T* at = reinterpret_cast<T*>(allocate(std::span(values).size_bytes()));
    std::copy(values.begin(), values.end(), at);
    return at;
  }
  /// A zero-terminated text.
  const char* text(const std::string& value) {
    char* at = allocate(value.size() + 1);
    std::memcpy(at, value.c_str(), value.size() + 1);
    return at;
  }
  static constexpr std::size_t kUnknownBytes = 64;

 private:
  char* allocate(std::size_t bytes);
  Mode mode_;
  std::vector<Pages> pages_;
  std::vector<std::unique_ptr<char[]>> plain_;
};

/// A view of CPU memory.
inline zr_view view_of(void* data, int64_t count, zr_dtype dtype) {
  return {data, count, dtype, 0, {ZR_DEVICE_CPU, 0}};
}

}  // namespace zr::conform
