// The leaves of the gradient norm, of all ranks, folded in the job's logical order (NUMERICS.md 7), a window of them at
// a time: what a rank holds for it does not grow with the model but by its own leaves.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ledger.hpp"
#include "base/pool.hpp"
#include "comm/communicator.hpp"
#include "offload/pages.hpp"
#include "plan/plan.hpp"
#include "update/norm.hpp"
#include "update/update.hpp"

namespace zr::host {

class NormLeaves {
 public:
  /// References outlive it; `units` are this rank's. pages: where sums stand that are in no memory; null: there are
  /// none. window: leaves that travel at a time.
  NormLeaves(Communicator& comm, Pool& pool, const Plan& plan, const std::vector<Unit>& units, Ledger& ledger,
             Pages* pages = nullptr, int64_t window = kLeafWindow);
  ~NormLeaves();
  NormLeaves(const NormLeaves&) = delete;

  /// Every rank has all leaves: nothing travels.
  bool everywhere() const { return leaves_.everywhere; }
  /// From now on sums are those of a step's last micro-batch: arrived() takes their leaves.
  void expect();
  /// These sums are as they will be: their leaves are added up while they are in the cache. `values`: where they are in
  /// memory now. [use]
  void arrived(const zr_view& sums, const void* values);
  /// Sums up what has not arrived of this rank's leaves; returns how many of their elements are not finite.
  int64_t sum();
  /// Leaves that this rank adds up in a step; of those of the last, how many had arrived before sum().
  int64_t own() const { return std::ssize(ready_); }
  int64_t early() const { return early_; }
  /// The sum over all leaves, and the first parameter of the model's order with a leaf that is not finite; -1: none.
  struct Folded {
    double sum_of_squares = 0;
    int64_t first_non_finite = -1;
  };
  /// Collective, after sum().
  Folded fold();

 private:
  struct Run {
    int64_t leaf, count;  // leaves, in the job's logical order
  };
  void provide(uint32_t param, const Segment& segment, const std::vector<Unit>& units, std::size_t& unit);
  void take(const double* leaves, int64_t first, int64_t count, Folded& folded) const;
  void gather(int64_t begin, int64_t end);
  int64_t non_finite_of(const zr_view& leaf) const;

  Communicator& comm_;
  Pool& pool_;
  const Plan& plan_;
  Ledger& ledger_;
  Pages* pages_;
  const Plan::Leaves leaves_;
  const int64_t window_;
  std::vector<int64_t> first_leaf_;                          // by parameter
  std::vector<std::vector<Run>> provides_;                   // by rank, ascending: leaves it hands to the others
  std::vector<LeafRun> own_;                                 // sums behind this rank's, in that order
  std::vector<std::size_t> at_;                              // by rank: the first run that is not gathered
  std::vector<std::pair<const char*, std::size_t>> places_;  // of own_, by the address of their sums
  std::vector<char> ready_;                                  // by own leaf: it has been added up
  int64_t early_ = 0;
  bool expects_ = false;
  int64_t sent_ = 0;             // of own leaves
  double* mine_ = nullptr;       // own leaves: in memory peers can read, as the next
  double* received_ = nullptr;   // a window, by rank
  std::vector<double> ordered_;  // the same, in logical order
};

}  // namespace zr::host
