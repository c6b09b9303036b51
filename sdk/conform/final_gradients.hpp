// The reduced gradients of a simulated rank after each collective that used them, to find later changes.
#pragma once

#include <cstddef>
#include <vector>

#include "conform/strategy_plan.hpp"
#include "zr/abi/communicator.h"
#include "zr/mutex.hpp"

namespace zr::conform {

/// Any thread.
class FinalGradients {
 public:
  /// plan, buffers: of the rank; buffers[i] is the memory of buffer i and outlives the object.
  FinalGradients(const RankPlan& plan, const std::vector<char*>& buffers, zr_dtype dtype);
  FinalGradients(const FinalGradients&) = delete;

  /// The last micro-step of a step begins: collectives before number `first` do not count any more.
  void begin(std::size_t first) ZR_EXCLUDES(mutex_);
  /// Collective `number` of the rank has ended: stores the reduced gradients that it read or wrote.
  void used(std::size_t number, const zr_coll& coll, int rank) ZR_EXCLUDES(mutex_);
  /// Throws Failure if a reduced gradient has changed since the last collective that used it.
  void check() const ZR_EXCLUDES(mutex_);

 private:
  struct Piece {
    uint32_t param;
    int64_t first;            // element of the parameter
    const char* memory;       // of the piece
    std::vector<char> bytes;  // as the last collective left them
    std::vector<char> used;   // by element: not 0 if a collective used it
  };
  const int64_t size_;  // of an element
  mutable Mutex mutex_;
  std::size_t first_ ZR_GUARDED_BY(mutex_) = ~std::size_t{0};
  std::vector<Piece> pieces_ ZR_GUARDED_BY(mutex_);
};

}  // namespace zr::conform
