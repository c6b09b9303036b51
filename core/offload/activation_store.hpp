// Offloaded activations on a tier: records of bytes, written while forward continues and read ahead of backward.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ledger.hpp"
#include "offload/tier.hpp"
#include "offload/tier_resources.hpp"

namespace zr::host::offload {

/// One call at a time, any thread. An allocation on the tier is reserved when it is first needed and reused for records
/// of its size, so with constant shapes only the first step reserves any.
class ActivationStore {
 public:
  /// Keeps references to both. `staging`: bytes of host memory that records pass through to and from a disk.
  ActivationStore(TierStore& tier, Ledger& ledger, int64_t staging);
  ~ActivationStore();
  ActivationStore(const ActivationStore&) = delete;

  /// Copies the data. Returns the number of the record, never 0.
  uint64_t put(const void* data, int64_t bytes);
  /// Copies a record to memory of its size. Throws EnvironmentError with the tier's error.
  void get(uint64_t record, void* to);
  /// Starts to read the records that are needed next, in this order, as far as buffers are free.
  void prefetch(const std::vector<uint64_t>& records);
  /// Deletes a record. If its write failed, the next put() or get() throws.
  void drop(uint64_t record) noexcept;

  struct Counts {
    int64_t reserved = 0;                  // allocations, of all sizes
    int64_t put = 0, got = 0;              // records
    int64_t ready = 0;                     // records got from a disk without waiting
    double write_wait = 0, read_wait = 0;  // seconds
  };
  const Counts& counts() const { return counts_; }

 private:
  struct Record {
    int64_t bytes, capacity;
    TierAllocation allocation;
  };
  /// A buffer in host memory for a part of a record: being written, being read, or kept after the write.
  struct StagingPart {
    char* memory;
    uint64_t record = 0;  // 0: free
    int64_t index = 0;
    bool writes = false;
    Transfer transfer;
  };
  Record& find(uint64_t record);
  bool is_in_flight(uint64_t record) const;
  void recycle(uint64_t number);
  void assign_allocation(Record& record);
  int64_t part_bytes(const Record& record, int64_t index) const;  // without padding
  StagingPart* part_of(uint64_t record, int64_t index);
  StagingPart* free_part(uint64_t before);
  StagingPart& evict(uint64_t number);
  void wait(StagingPart& part);
  void start_read(StagingPart& part, uint64_t number, const Record& record, int64_t index);
  std::string name_of(const Record& record) const;

  TierStore& tier_;
  const int64_t part_capacity_;  // bytes
  TrackedMemory memory_;         // for all parts
  RegisteredMemory registered_;  // for all parts
  std::vector<StagingPart> parts_;
  std::unordered_map<uint64_t, Record> records_;
  std::vector<uint64_t> pending_release_;                // dropped, but still being written
  std::map<int64_t, std::vector<TierAllocation>> free_;  // allocations by size
  std::unordered_map<uint64_t, char*> mapped_;           // by allocation
  uint64_t last_number_ = 0;
  std::string failure_;  // error of a background write; empty: none
  Counts counts_;
};

}  // namespace zr::host::offload
