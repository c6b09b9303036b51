// What forward keeps for backward, on a tier: records of bytes, written behind forward and read ahead of backward.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ledger.hpp"
#include "offload/tier.hpp"
#include "offload/tier_resources.hpp"

namespace zr::host {

/// One call at a time, any thread. Room on the tier is reserved when it is first needed and kept for the next records
/// of its size, so that steps of the same shapes reserve in the first alone.
class ActivationStore {
 public:
  /// Refers to both. `staging`: bytes of host memory that records pass through on their way to a disk.
  ActivationStore(TierStore& tier, Ledger& ledger, int64_t staging);
  ~ActivationStore();
  ActivationStore(const ActivationStore&) = delete;

  /// Takes a copy. The number of the record is never 0.
  uint64_t put(const void* data, int64_t bytes);
  /// Copies a record to memory of its size. Throws Failure(environment) with what the tier says.
  void get(uint64_t record, void* to);
  /// Begins to read what will be asked for next, in this order, as far as there is room.
  void prefetch(const std::vector<uint64_t>& records);
  /// It is never asked for again. A write that failed meanwhile is thrown by the next put() or get().
  void drop(uint64_t record) noexcept;

  struct Counts {
    int64_t reserved = 0;                  // slots, of all sizes
    int64_t put = 0, got = 0;              // records
    int64_t ready = 0;                     // of those got from a disk: nothing had to be waited for
    double write_wait = 0, read_wait = 0;  // seconds
  };
  const Counts& counts() const { return counts_; }

 private:
  struct Record {
    int64_t bytes, capacity;
    TierAllocation allocation;
  };
  /// A part of a record in host memory, on its way to the disk or back, or left of that.
  struct Part {
    char* memory;
    uint64_t record = 0;  // 0: free
    int64_t index = 0;
    bool writes = false;
    Transfer transfer;
  };
  Record& find(uint64_t record);
  bool is_in_flight(uint64_t record) const;
  void retire(uint64_t number);
  void take_allocation(Record& record);
  int64_t part_bytes(const Record& record, int64_t index) const;  // what of it is data
  Part* part_of(uint64_t record, int64_t index);
  Part* free_part(uint64_t before);
  Part& make_free(uint64_t number);
  void wait(Part& part);
  void start_read(Part& part, uint64_t number, const Record& record, int64_t index);
  std::string name_of(const Record& record) const;

  TierStore& tier_;
  const int64_t part_capacity_;  // bytes
  TrackedMemory memory_;         // of all parts
  RegisteredMemory registered_;  // likewise
  std::vector<Part> parts_;
  std::unordered_map<uint64_t, Record> records_;
  std::vector<uint64_t> pending_release_;                // dropped, but still being written
  std::map<int64_t, std::vector<TierAllocation>> free_;  // slots by size
  std::unordered_map<uint64_t, char*> mapped_;           // by slot
  uint64_t last_ = 0;
  std::string failed_;  // a write that nobody waited for
  Counts counts_;
};

}  // namespace zr::host
