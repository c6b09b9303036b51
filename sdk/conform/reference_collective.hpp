// Collectives in plain scalar code: computes the result of every rank from the arguments of all ranks in one process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zr/abi/communicator.h"

namespace zr::conform {

/// The arguments of one rank, copied so that they stay valid.
struct RankCollective {
  explicit RankCollective(const zr_coll& given, int world);
  RankCollective() = default;
  zr_coll coll{};
  std::vector<int64_t> counts, recv_counts;  // empty: not given
  std::string label;
};

/// The host of a rank in a job on two hosts, which have half of the ranks each.
constexpr int host_of_rank(int rank, int world) { return rank * 2 / world; }

/// True for all_reduce, reduce_scatter and reduce.
bool is_reduction(uint32_t op);
/// True if the operation reads src on this rank, or writes dst.
bool reads_src(const zr_coll& coll, int rank);
bool writes_dst(const zr_coll& coll, int rank);

/// Why the arguments of the ranks do not fit together, or are invalid; "" if they are valid.
std::string problem_of(const std::vector<RankCollective>& ranks);

/// Performs a collective that is no send or recv: writes the dst of every rank. Reductions add in rank order.
void perform(const std::vector<RankCollective>& ranks);

}  // namespace zr::conform
