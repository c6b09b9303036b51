// Finds weights that differ between ranks: each step's exchange contains a digest of a part of the weights, and of what
// the program wrote to sharded weights.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "comm/comm_runtime.hpp"
#include "plan/plan.hpp"

namespace zr::host::engine {

/// Weights that every rank has in its own memory are compared in turns, a part per step. The compared bytes are at most
/// half a percent of the bytes that the optimizer touches. All of these weights are compared once within
/// 200 x (weight bytes / optimizer bytes per rank) steps. In addition, parameters that operators or zr::gather scopes
/// wrote to since the last step are compared in full in the next one.
/// Of a sharded parameter that was written to, the hashes of the values that each rank had gathered are compared: each
/// rank stores only its shard of them. Training thread only.
class WeightDigest {
 public:
  /// `buffers`: by buffer of the plan, its address; `readers`: by buffer, null unless it is shared memory, which needs
  /// no comparison. `plan` and the memory outlive the object.
  /// device: which the buffers are on; null: in host memory.
  WeightDigest(const plan::MemoryPlan& plan, const std::vector<void*>& buffers, const std::vector<const void*>& readers,
               int world, DeviceMemory* device);
  ~WeightDigest();
  WeightDigest(const WeightDigest&) = delete;

  /// Records that the program wrote to this parameter since the last step.
  void written(uint32_t param) { written_.insert(param); }
  /// Forgets what written() recorded since the last step.
  void forget_writes() { written_.clear(); }
  /// The values of the parameter are the same on all ranks from now on.
  void replaced(uint32_t param) { rejected_.erase(param); }
  /// One rank's part of the exchange. All ranks choose the same part of the weights.
  struct Digest {
    uint64_t weights = 0;  // digest of the part
    uint64_t values = 0;   // digest of the parameters that were written to
    uint64_t written = 0;  // digest of the list of parameters that were written to, with the hashes of sharded ones
  };
  /// Returns the digest of the next part. Called once per step. gathered_writes: as WeightFlow::take_writes().
  Digest next(std::map<uint32_t, uint64_t> gathered_writes = {});
  /// Compares the digests of all ranks (in rank order). If weights differ, throws UserError on all ranks, naming the
  /// parameter, the elements and the ranks, in this call and the next ones, until the values are equal again or
  /// replaced() is called. Collective.
  void compare(const std::vector<Digest>& digests, comm::CommRuntime& comm, int64_t step);
  /// Records that the optimizer updated parameters. touched: by parameter, not 0 if it was updated.
  void updated(const std::vector<char>& touched);

  int64_t bytes() const { return bytes_; }                               // number of bytes that this rank digested
  int64_t optimizer_bytes() const { return optimizer_bytes_ / world_; }  // touched by it; mean over ranks
  int64_t cycles() const { return cycles_; }                             // how often all weights were compared

 private:
  struct DigestRange {
    uint32_t param;
    int64_t first, count;  // elements
  };
  std::vector<uint64_t> digests_of(const std::vector<DigestRange>& parts);
  uint64_t digest_all(const std::vector<DigestRange>& parts);
  void take_turn(int64_t elements);
  uint64_t digest_of_writes() const;
  std::vector<DigestRange> all_written(comm::CommRuntime& comm) const;
  void compare_gathered_writes(comm::CommRuntime& comm, int64_t step);
  int64_t different_element(DigestRange part, bool last, comm::CommRuntime& comm);
  std::vector<DigestRange> suspected_parts(const std::vector<Digest>& digests, comm::CommRuntime& comm) const;
  [[noreturn]] void fail(const DigestRange& part, const std::string& difference, int64_t step) const;

  const plan::MemoryPlan& plan_;
  int world_;
  DeviceMemory* const device_;
  void* const gathered_;  // memory of the device for what is read from it; null: in host memory
  int64_t size_of_weight(uint32_t param) const { return size_of(plan_.input.dtype_of(param)); }
  int64_t largest_size_ = 0;         // bytes per element of a weight
  std::vector<const char*> memory_;  // by parameter; null: not replicated, so not compared
  std::vector<uint32_t> replicated_;
  std::vector<int64_t> state_bytes_;  // by parameter: bytes that the optimizers of all ranks touch per step
  std::set<uint32_t> written_, compared_;
  std::map<uint32_t, uint64_t> gathered_writes_;  // of the current step
  struct Rejected {
    std::string difference;
    int64_t step;
  };
  std::map<uint32_t, Rejected> rejected_;  // sharded parameters whose shards are of different writes; as on all ranks
  std::vector<DigestRange> turn_, written_parts_;  // of the current step
  std::size_t at_ = 0;                             // the next turn begins at replicated_[at_], element_
  int64_t element_ = 0;
  int64_t turn_bytes_ = 0;  // the same on all ranks, like all values that turns depend on
  int64_t bytes_ = 0, optimizer_bytes_ = 0, cycles_ = 0;
};

}  // namespace zr::host::engine
