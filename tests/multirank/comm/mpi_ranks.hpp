// Tests of comm_mpi: their ranks are the test program itself, which mpirun starts for one test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "control/control.hpp"
#include "multirank/comm/cases.hpp"
#include "support/comm_rig.hpp"
#include "support/shell.hpp"
#include "zr/collective.hpp"

namespace zr::testing {

/// Keys with which collectives of all sizes pass through few ranks of each host.
inline constexpr const char* kAllSizes = "hierarchy_min_bytes = 0\n";

inline zr_view view(void* data, int64_t count, zr_dtype dtype = ZR_F32) { return {data, count, dtype, 0, {1, 0}}; }

/// Runs the body on each rank; the ranks are this program, which mpirun starts for the current test only. They do not
/// exit before all have ended the body, and mpirun's exit code does not matter: it reports ranks that end after a
/// failure. hosts: by rank, the host that it pretends to be on; or empty.
inline void on_mpi_processes(int world, const std::function<void(const std::shared_ptr<host::control::Control>&)>& body,
                             const std::vector<int>& hosts = {}) {
  const auto passed = [](int rank) { return "rank " + std::to_string(rank) + " has passed\n"; };
  if (!std::getenv("OMPI_COMM_WORLD_RANK")) {
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    const auto done = shell(ZR_SOURCE_DIR "/tests/support/mpirun.sh --bind-to none --oversubscribe -n " +
                            std::to_string(world) + " " + std::filesystem::read_symlink("/proc/self/exe").string() +
                            " --gtest_filter=" + test.test_suite_name() + "." + test.name());
    for (int rank = 0; rank < world; ++rank) EXPECT_THAT(done.output, ::testing::HasSubstr(passed(rank)));
    return;
  }
  const auto control = zr::host::control::Control::join();
  try {
    if (!hosts.empty())
      ::setenv("ZR_HOST_ID", std::to_string(hosts[static_cast<std::size_t>(control->rank())]).c_str(), 1);
    body(control);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  if (!::testing::Test::HasFailure()) std::cout << passed(control->rank()) << std::flush;
  control->put("ended." + std::to_string(control->rank()), "");
  for (int rank = 0; rank < world; ++rank) control->get("ended." + std::to_string(rank), std::chrono::seconds(60));
  control->leave(0, false);
  if (::testing::Test::HasFailure()) ::_exit(1);
}

/// Runs the body on each rank as on_mpi_processes() does. keys: TOML lines of the plug-in's table.
inline void on_mpi_ranks(int world, const std::function<void(CommRig&)>& body, const std::string& keys = {},
                         const std::vector<int>& hosts = {}) {
  on_mpi_processes(
      world,
      [&](const std::shared_ptr<host::control::Control>& control) {
        CommRig rig(control, {.id = "mpi", .keys = keys});
        body(rig);
      },
      hosts);
}

/// The sum of so many equal values in fp32, one after the other: larger sums than 2^24 are rounded.
inline float sum_of_equal(float value, int count) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += value;
  return sum;
}

/// An operation that has been submitted with a completion.
class Started {
 public:
  Started(RawComm& comm, const zr_coll& coll) : comm_(comm), done_(host::comm::done_new(comm.host().abi())) {
    EXPECT_EQ(comm.submit(coll, done_), ZR_OK) << comm.said();
  }
  ~Started() { host::comm::done_release(done_); }
  Started(const Started&) = delete;
  zr_code finish() { return comm_.finish(done_); }
  zr_code code() { return host::comm::done_poll(done_, nullptr); }

 private:
  RawComm& comm_;
  zr_done* done_;
};

/// What the test cases need of an open communicator; their memory is private.
class PrivateBench {
 public:
  explicit PrivateBench(RawComm& comm)
      : bench{comm.rank(), comm.world(), [&comm](const zr_coll& coll) { comm.run(coll); },
              [this](int64_t bytes) {
                std::vector<char> block(static_cast<std::size_t>(bytes));
                void* const data = block.data();
                memory_[data] = std::move(block);
                return data;
              },
              [this](void* data) { memory_.erase(data); }} {}
  PrivateBench(const PrivateBench&) = delete;
  const Bench bench;

 private:
  std::map<void*, std::vector<char>> memory_;
};

}  // namespace zr::testing
