// Memory whose use is noticed, also through a pointer.
#pragma once

#include <cstddef>
#include <utility>

namespace zr::host::model {

/// Zeroed pages of their own: an access through a pointer after they are freed is a fault, not a use of other memory.
/// One thread.
class WatchedPages {
 public:
  /// Throws std::bad_alloc.
  explicit WatchedPages(std::size_t bytes);
  ~WatchedPages();
  /// `other` has no pages then.
  WatchedPages(WatchedPages&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        watch_(std::exchange(other.watch_, kNone)) {}
  /// Exchanges the pages.
  WatchedPages& operator=(WatchedPages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(watch_, other.watch_);
    return *this;
  }
  char* get() const { return data_; }
  /// From now on, used() tells whether the program has read or written the pages; they keep their values. While there
  /// are such pages, the process has a handler for SIGSEGV, which passes other faults to the handler before it. Returns
  /// false if there are too many of them: then nothing is noticed.
  bool watch();
  bool used() const;

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};
  char* data_;
  std::size_t bytes_;
  std::size_t watch_ = kNone;  // an index of the watched regions
};

}  // namespace zr::host::model
