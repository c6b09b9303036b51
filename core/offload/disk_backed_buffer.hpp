// One buffer of the plan that stands on a disk: addresses without memory, a slot, and ranges of it on their way.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "offload/tier.hpp"
#include "offload/tier_resources.hpp"

namespace zr::host {

/// Ranges are bytes [from, to). A staging is memory for a range's whole blocks: block_begin(from) to block_end(to). One
/// call at a time.
class DiskBackedBuffer {
 public:
  /// `edges`: blocks that stay in memory (DiskStaging).
  DiskBackedBuffer(TierStore& tier, int64_t bytes, TierStore::LedgerEntry held,
                   const std::vector<int64_t>& resident_blocks, Ledger& ledger);
  DiskBackedBuffer(const DiskBackedBuffer&) = delete;

  /// Its first address.
  char* base() const { return space_.get(); }
  /// The address is one of its own.
  bool holds(const void* at) const {
    const char* const address = static_cast<const char*>(at);
    return base() <= address && address < base() + size_;
  }
  /// The edges of blocks at or before and at or behind a byte.
  int64_t block_begin(int64_t at) const { return at / block_ * block_; }
  int64_t block_end(int64_t at) const { return (at + block_ - 1) / block_ * block_; }
  int64_t block() const { return block_; }         // bytes
  const std::string& tag() const { return tag_; }  // of the plan's buffer

  /// Begins to bring a range into its staging. Waits for a write of it that is under way. Returns what to wait() for.
  uint64_t read(int64_t from, int64_t to, char* staging, const std::string& what);
  /// Begins to write a range from its staging, and waits for what is under way with it. Bytes of the staging outside
  /// the range are not used.
  uint64_t write(int64_t from, int64_t to, const char* staging, const std::string& what);
  /// Before a range is written: reads what is needed besides, where its ends are not planned edges.
  void prepare_write(int64_t from, int64_t to, const std::string& what);
  /// Throws Failure(environment) as Transfer does. A number that is over is nothing.
  void wait(uint64_t number);
  /// wait() returns at once.
  bool is_over(uint64_t number) const;
  /// A write of some of it is under way.
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
  // Calls fn(first, end, kept) over runs of a range's blocks: one that stays in memory, or many on disk, all of them
  // written before (true) or none.
  template <class F>
  void each_run(int64_t from, int64_t to, bool by_written, F&& fn) const;
  void wait_for(int64_t from, int64_t to, bool writes_only);
  void make_resident(int64_t block, const std::string& what);

  TierStore& tier_;
  Ledger& ledger_;
  const std::string tag_;
  const int64_t block_, size_;          // size_: of the slot
  std::unique_ptr<char, Unmap> space_;  // addresses
  TierAllocation slot_;
  std::map<int64_t, TrackedMemory> resident_;  // by block
  std::vector<bool> written_;                  // likewise: it has been; else zeros
  std::vector<PendingTransfer> pending_;  // under way, or nobody waited for them yet; waited for before all above goes
  uint64_t last_ = 0;
};

}  // namespace zr::host
