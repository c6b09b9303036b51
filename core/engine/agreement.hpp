// What all ranks must know alike once a step: losses, touched parameters, non-finite elements, the norm (NUMERICS.md 6,
// 7, 11).
#pragma once

#include <cstdint>
#include <vector>

#include "base/ledger.hpp"
#include "base/pool.hpp"
#include "comm/communicator.hpp"
#include "engine/norm_leaves.hpp"
#include "engine/weight_digest.hpp"
#include "plan/plan.hpp"
#include "update/update.hpp"

namespace zr::host {

struct Agreed {
  double loss = 0;    // mean over the step's micro-batches, weighted if they are
  double weight = 0;  // M, or the sum of the micro-batches' weights
  double sum_of_squares = 0;
  int64_t non_finite = 0;  // elements of the sums
  /// Where there are any: the first parameter of the model's order that has some, and the first rank that handed over
  /// some of the first parameter of which a rank did (-1: none did, or none looked); and whose loss was not finite.
  int64_t first_param = -1, first_given = -1;
  int giver = -1, loss_rank = -1;
  int64_t tokens = 0;
  std::vector<char> touched;
  int stop = 0;                             // a signal that some rank got
  bool save_failed = false;                 // a checkpoint in the background
  std::vector<WeightDigest::Word> digests;  // by rank
};

class Agreement {
 public:
  /// References outlive the agreement; `units` are this rank's; pages: see NormLeaves.
  Agreement(Communicator& comm, Pool& pool, const Plan& plan, const std::vector<Unit>& units, Ledger& ledger,
            Pages* pages);
  Agreement(const Agreement&) = delete;

  struct Mine {
    std::vector<double> losses, weights;  // by micro-step
    int64_t tokens;
    const std::vector<char>* touched;
    int64_t first_non_finite;  // parameter, of the gradients handed over; -1: none
    int stop = 0;
    bool save_failed = false;
    WeightDigest::Word digest{};
  };
  NormLeaves& norm() { return norm_; }
  /// Collective. Reads the units' sums, which must be complete.
  Agreed reach(const Mine& mine);

 private:
  Communicator& comm_;
  NormLeaves norm_;
};

}  // namespace zr::host
