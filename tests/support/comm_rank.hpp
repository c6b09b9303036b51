// One rank of a test with its plug-in host and its CommRuntime.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"
#include "zr/collective.hpp"

namespace zr::testing {

struct CommRank {
  Rank& rank;
  CommRig& rig;
  host::comm::CommRuntime& comm;
  SharedJob& job;
  float* floats(int64_t count) {
    return static_cast<float*>(comm.allocate(count * 4, 64, host::Tier::host, host::MemoryKind::other, "test"));
  }
};

inline std::vector<RankResult> on_ranks(
    int world, RigOptions options, const std::function<void(CommRank&)>& body,
    std::function<void(const SharedJob&, const std::vector<pid_t>&)> meanwhile = {}) {
  SharedJob job;
  RankOptions how;
  if (meanwhile) how.meanwhile = [&](const std::vector<pid_t>& pids) { meanwhile(job, pids); };
  return run_ranks(
      world,
      [&](Rank& rank) {
        CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world), options);
        const auto comm = rig.open();
        CommRank self{rank, rig, *comm, job};
        body(self);
      },
      how);
}

inline zr_coll collective(uint32_t op, const zr_view& src, const zr_view& dst, const char* label) {
  zr_coll coll = zr::collective(op, src, dst, label);
  coll.reduce = ZR_SUM;
  return coll;
}
inline zr_view view(void* data, int64_t count, zr_dtype dtype = ZR_F32) { return {data, count, dtype, 0, {1, 0}}; }

/// Expects that `act` throws an Error with this exit code and a message that matches `says`.
inline void expect_failure(const std::function<void()>& act, int exit,
                           const ::testing::Matcher<const std::string&>& says) {
  try {
    act();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit) << failure.what();
    EXPECT_THAT(std::string(failure.what()), says);
  }
}

}  // namespace zr::testing
