// Values that a constructor writes through pointers (data_ptr, accessor) to tensors that at::empty made.
// torch::tensor() of a vector is such a constructor.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "model/placeholder.hpp"
#include "model/watched_pages.hpp"

namespace zr::host::model {

/// Memory for small placeholders, from their creation until the first operator that uses them. Used on the thread that
/// builds the model.
class PointerWrites {
 public:
  /// Larger tensors get no memory: an access by pointer throws.
  static constexpr std::size_t kLargest = std::size_t{1} << 20;
  /// Called with the values of a storage that are not all zero.
  using Written = std::function<void(c10::StorageImpl& storage, std::shared_ptr<const std::string> bytes)>;

  /// Attaches zeroed memory to the placeholder.
  void open(Placeholder& placeholder);
  /// Detaches the memory, if the storage has some.
  void close(c10::StorageImpl& storage, const Written& written);
  /// An operator has written to the storage: what its detached memory has is no longer its value.
  void outdate(c10::StorageImpl& storage);
  /// Detaches and frees all memory. False if memory was written after it had been detached, or used after its storage
  /// had other values.
  bool finish(const Written& written);

 private:
  // The memory is kept after close(), because the program may still have a pointer to it.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    WatchedPages data;
    std::size_t bytes = 0;
    bool open = true;
    bool outdated = false;                      // the storage has other values since it was closed
    std::shared_ptr<const std::string> values;  // when it was closed; null: all zero
    bool stays_valid() const;
  };
  void close(Memory& memory, const Written& written);
  void forget(std::size_t bytes);

  std::deque<Memory> memory_;
  std::size_t total_ = 0;
  bool valid_ = true;
};

}  // namespace zr::host::model
