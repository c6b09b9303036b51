// Strategies may pass placeholder addresses of buffers that reside on another tier. While a collective is in flight,
// the data that it reads or writes there is staged in memory.
#pragma once

#include <cstdint>

#include "zr/abi/communicator.h"

namespace zr::host::comm {

/// Maps placeholder addresses to memory. [use]
class CollectiveStaging {
 public:
  static constexpr uint64_t kNotStaged = 0, kNoCapacity = ~uint64_t{0};
  virtual ~CollectiveStaging() = default;
  /// Replaces the placeholder addresses in the views of `coll` by memory that contains the data that `coll` reads.
  /// Returns a number for unstage(). kNotStaged: no view has a placeholder address. kNoCapacity: no view was changed,
  /// because there is no memory, or the data is not available, until an earlier collective is unstaged. May throw.
  virtual uint64_t stage(zr_coll& coll) = 0;
  /// The collective has ended. If it `succeeded`, its results are written back. A failure of the write is thrown
  /// by a later stage().
  virtual void unstage(uint64_t number, bool succeeded) noexcept = 0;
};

}  // namespace zr::host::comm
