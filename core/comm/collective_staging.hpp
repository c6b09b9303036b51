// Strategies may pass disk-backed addresses: addresses without memory, of buffers on a disk tier. While a collective
// is in flight, the data that it reads or writes there is staged in memory.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>

#include "zr/abi/communicator.h"

namespace zr::host::comm {

/// Maps disk-backed addresses to memory. [use]
class CollectiveStaging {
 public:
  static constexpr uint64_t kNotStaged = 0, kNoCapacity = ~uint64_t{0};
  virtual ~CollectiveStaging() = default;
  /// Replaces the disk-backed addresses in the views of `coll` by memory that contains the data that `coll` reads.
  /// Returns a number for unstage(). kNotStaged: no view has a disk-backed address. kNoCapacity: no view was changed,
  /// because there is no memory, or the data is not available, until an earlier collective is unstaged. May throw.
  virtual uint64_t stage(zr_coll& coll) = 0;
  /// Call when the collective has ended. If it `succeeded`, starts to write its results back. A later stage() throws a
  /// failure of the write.
  virtual void unstage(uint64_t number, bool succeeded) noexcept = 0;
};

/// The collectives in flight that are staged. [use]
class StagedCollectives {
 public:
  /// `staging` must outlive every collective; null: no staging.
  void set_staging(CollectiveStaging* staging) { staging_ = staging; }
  /// CollectiveStaging::stage(). While there is no capacity, calls `wait` with the completion of the oldest collective.
  /// Returns the code of a failed wait.
  zr_code stage(zr_coll& coll, uint64_t& number, const std::function<zr_code(zr_done* done)>& wait);
  /// Adds the completion of a collective that stage() has staged, in the order of submission.
  void add(zr_done* done);
  /// CollectiveStaging::unstage(), except for kNotStaged.
  void unstage(uint64_t number, bool succeeded) noexcept;
  /// Forgets all completions.
  void clear();

 private:
  CollectiveStaging* staging_ = nullptr;
  std::deque<zr_done*> completions_;  // of collectives that may still be staged, in the order of submission
};

}  // namespace zr::host::comm
