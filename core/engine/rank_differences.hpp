// The error about weights whose values differ between ranks.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plan/plan.hpp"

namespace zr::host::engine {

/// The ranks that have equal values, by a digest of these values.
using RanksByDigest = std::map<std::string, std::vector<int>>;
/// "rank 1", "ranks 0 and 2".
std::string list_of(const std::vector<int>& ranks);
/// "rank 1 has different values than ranks 0 and 2"; of writes: "rank 1 wrote ...". `groups`: at least two.
std::string difference_between(const RanksByDigest& groups, bool of_writes = false);

/// Elements of a parameter that differ, and what is different about them.
struct DifferentElements {
  const plan::Parameter& parameter;
  int64_t first, count;
  std::string difference;
};
/// Throws UserError. found: "found in step 2".
[[noreturn]] void fail_weights_differ(const DifferentElements& elements, const std::string& found);

}  // namespace zr::host::engine
