// Ranks that call comm_shm directly through its C table, and helpers that build collectives.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"

namespace zr::testing {

using host::comm::done_new;
using host::comm::done_poll;
using host::comm::done_release;

inline std::vector<RankResult> on_ranks(int world, const std::function<void(RawComm&, Rank&)>& body,
                                        RankOptions options = {}) {
  const SharedJob job;
  return run_ranks(
      world,
      [&](Rank& rank) {
        CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
        RawComm comm(rig);
        body(comm, rank);
      },
      options);
}

inline zr_coll collective(uint32_t op, void* src, int64_t src_count, void* dst, int64_t dst_count, const char* label,
                          uint64_t fingerprint = 1) {
  zr_coll coll{};
  coll.size = sizeof coll;
  coll.op = op;
  coll.reduce = ZR_SUM;
  coll.src = {src, src_count, ZR_F32, 0, {1, 0}};
  coll.dst = {dst, dst_count, ZR_F32, 0, {1, 0}};
  coll.label = label;
  coll.fingerprint = fingerprint;
  return coll;
}

inline void barrier(RawComm& comm) { comm.run(collective(ZR_BARRIER, nullptr, 0, nullptr, 0, "barrier", 77)); }

}  // namespace zr::testing
