// Addresses without memory that strategies hold in place of memory: what a collective reads or writes there is brought
// in for as long as it is under way.
#pragma once

#include <cstdint>

#include "zr/abi/communicator.h"

namespace zr::host {

/// What stands behind such addresses. [use]
class CollectiveStaging {
 public:
  static constexpr uint64_t kNotStaged = 0, kNoCapacity = ~uint64_t{0};
  virtual ~CollectiveStaging() = default;
  /// Puts memory in place of the views of `coll` that have none, with what it reads of them. Returns a number to leave
  /// with; kNotStaged: no view was touched; kNoCapacity: nor is what it reads there, or memory for it, before one that
  /// entered earlier has left. May throw.
  virtual uint64_t stage(zr_coll& coll) = 0;
  /// It has ended; `well`: what it wrote is to be kept. Failures are thrown by a later enter().
  virtual void unstage(uint64_t number, bool well) noexcept = 0;
};

}  // namespace zr::host
