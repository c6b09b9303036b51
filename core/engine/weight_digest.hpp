// Finds weights that differ between ranks: a digest of a part of them travels with each step's exchange.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "comm/comm_runtime.hpp"
#include "plan/plan.hpp"

namespace zr::host {

/// The weights that every rank has in memory of its own are compared part by part, in turns, at a cost of at most half
/// a percent of the bytes that the optimizer touches. All of them are compared within 200 x weight bytes / optimizer
/// bytes per rank steps. Parameters that operators wrote to are sampled at once, besides; those that not all ranks
/// wrote to are compared in full. Training thread only.
class WeightDigest {
 public:
  /// `buffers`: of the plan; `readers`: where one is shared memory, which needs no comparison, else null. All outlive
  /// the object.
  WeightDigest(const MemoryPlan& plan, const std::vector<void*>& buffers, const std::vector<const void*>& readers,
               int world);

  /// The program wrote to this parameter since the last step.
  void written(uint32_t param) { written_.insert(param); }
  /// One rank's part of the exchange. All ranks choose the same part, and the same samples if they wrote alike.
  struct Digest {
    uint64_t weights = 0;  // digest of the part
    uint64_t samples = 0;  // digest of the samples of parameters that were written to
    uint64_t written = 0;  // digest of the list of parameters that were written to
  };
  /// Of the next part; once per step.
  Digest next();
  /// Collective. `words`: of all ranks. Throws Failure(user) on all ranks, naming parameter and ranks, if the words
  /// differ because weights do.
  void compare(const std::vector<Digest>& words, CommRuntime& comm, int64_t step);
  /// The optimizer updated these parameters.
  void updated(const std::vector<char>& touched);

  int64_t bytes() const { return bytes_; }                               // that this rank digested
  int64_t optimizer_bytes() const { return optimizer_bytes_ / world_; }  // mean over ranks
  int64_t cycles() const { return cycles_; }                             // times that all weights were compared

 private:
  struct Part {
    uint32_t param;
    int64_t first, count;  // elements
  };
  uint64_t digest(const Part& part) const;
  uint64_t digest_all(const std::vector<Part>& parts);
  void take_turn(int64_t elements);
  void sample_written();

  const MemoryPlan& plan_;
  int world_;
  int64_t size_;                     // bytes per element of a weight
  std::vector<const char*> memory_;  // by parameter; null: not replicated
  std::vector<uint32_t> replicated_;
  std::vector<int64_t> state_bytes_;  // by parameter: what the optimizers of all ranks touch in a step
  std::set<uint32_t> written_, compared_;
  std::vector<Part> turn_, samples_;  // of the step
  std::size_t at_ = 0;                // in replicated_, as the next
  int64_t element_ = 0;
  int64_t turn_bytes_ = 0;  // the same on all ranks, as is all else that decides about turns
  int64_t bytes_ = 0, optimizer_bytes_ = 0, cycles_ = 0;
};

}  // namespace zr::host
