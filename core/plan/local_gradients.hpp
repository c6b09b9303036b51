// The memory of a rank for steps with local gradients (zr/abi/draft/local_gradients.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/ledger.hpp"
#include "zr/abi/base.h"

namespace zr::host::plan {

struct MemoryPlan;

/// Bytes of the optimizer's exchange.
struct ExchangeSizes {
  int64_t scratch = 0;   // memory of this rank for messages
  int64_t received = 0;  // by all ranks together, per step
};
/// Asks the optimizer. counts: elements by trainable parameter; served: by range that this rank serves.
using ExchangePlan =
    std::function<ExchangeSizes(const std::vector<int64_t>& counts, const std::vector<int64_t>& served, int world)>;

/// Elements [first, first + count) of a parameter, whose compressed sums one rank computes.
struct ServedRange {
  int64_t first, count;
  int rank;
};

/// An array of this rank for steps with local gradients.
struct LocalArray {
  MemoryKind kind;
  std::string tag;  // in the ledger
  int64_t elements;
  zr_dtype dtype;
  bool shared = false;  // the ranks of a host have one copy
  int64_t counted = 0;  // elements that count for this rank: its part of a shared array
  int64_t bytes() const { return counted * size_of(dtype); }
};

/// What a rank holds for steps with local gradients. In arrays of all elements, every trainable parameter is complete;
/// in arrays of served elements, a rank has its ranges of a parameter one after the other.
struct LocalPlan {
  std::vector<std::vector<ServedRange>> ranges;  // by parameter, ascending; plan_of_rank(): this rank's may be the only
  std::vector<int64_t> offsets, served_offsets;  // by parameter: its first element
  int64_t elements = 0, served = 0;              // of an array
  ExchangeSizes exchange;
  std::size_t private_arrays = 0;  // of `arrays`, after the first
  /// This rank updates weights that other ranks own: it has the masters and the states that this needs.
  bool has_replicas = false;
  /// The local gradients, the private states in the order of the optimizer's list, then with replicas the masters, if
  /// there are any, and the unsharded states; last the messages.
  std::vector<LocalArray> arrays;
};

/// Empty unless the job's optimizer needs local gradients.
LocalPlan local_plan(const MemoryPlan& plan);

}  // namespace zr::host::plan
