// One buffer of the plan that is stored on disk: addresses without memory, an allocation, and transfers of its ranges.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/round_up.hpp"
#include "offload/tier.hpp"
#include "offload/tier_resources.hpp"

namespace zr::host::offload {

/// Ranges are bytes [from, to). Staging memory covers the full blocks of a range: block_begin(from) to block_end(to).
/// One call at a time.
class DiskBackedBuffer {
 public:
  /// `resident_blocks`: blocks that stay in memory (DiskStaging).
  DiskBackedBuffer(TierStore& tier, int64_t bytes, TierStore::LedgerEntry entry,
                   const std::vector<int64_t>& resident_blocks, Ledger& ledger);
  DiskBackedBuffer(const DiskBackedBuffer&) = delete;

  /// The first address.
  char* base() const { return space_.get(); }
  /// True if the address is in this buffer.
  bool holds(const void* at) const {
    const char* const address = static_cast<const char*>(at);
    return base() <= address && address < base() + size_;
  }
  /// The block boundary at or before a byte, and the one at or after it.
  int64_t block_begin(int64_t at) const { return at / block_ * block_; }
  int64_t block_end(int64_t at) const { return round_up(at, block_); }
  int64_t block() const { return block_; }         // bytes
  const std::string& tag() const { return tag_; }  // of the plan's buffer

  /// Starts to read a range into `staging`, after writes to it in progress. Returns the number for wait().
  uint64_t read(int64_t from, int64_t to, char* staging, const std::string& what);
  /// Starts to write a range from `staging`, after its transfers in progress. Bytes of `staging` outside the range are
  /// not used. Returns the number for wait().
  uint64_t write(int64_t from, int64_t to, const char* staging, const std::string& what);
  /// Call before write(): if an end of the range is inside a block that is not resident, makes that block resident.
  void prepare_write(int64_t from, int64_t to, const std::string& what);
  /// Waits for the transfers of a read() or write(); does nothing if they are over. Throws EnvironmentError as
  /// Transfer does.
  void wait(uint64_t number);
  /// True if wait() would return at once.
  bool is_over(uint64_t number) const;
  /// True if a write of a part of the range is in progress.
  bool is_written(int64_t from, int64_t to) const;

 private:
  struct PendingTransfer {
    uint64_t number;
    int64_t from, to;
    bool writes;
    Transfer transfer;
  };
  struct Unmap {
    int64_t bytes;
    void operator()(char* space) const;
  };
  // Calls fn(first, end, resident, written) for the parts of a range: a single resident block, or several blocks on
  // disk. With `by_written`, either all blocks of a part were written before or none.
  template <class F>
  void for_each_range(int64_t from, int64_t to, bool by_written, F&& fn) const;
  void wait_for(int64_t from, int64_t to, bool writes_only);
  void make_resident(int64_t block, const std::string& what);

  TierStore& tier_;
  Ledger& ledger_;
  const std::string tag_;
  const int64_t block_, size_;          // size_: of the allocation
  std::unique_ptr<char, Unmap> space_;  // addresses without memory
  TierAllocation allocation_;
  std::map<int64_t, TrackedMemory> resident_;  // by block
  std::vector<bool> written_;                  // by block; zeros until it is written
  std::vector<PendingTransfer> pending_;       // in progress or not waited for; destroyed before the above, waits
  uint64_t last_number_ = 0;
};

}  // namespace zr::host::offload
