// The communicator "shm" for memory of a device, on the simulated device of tests/simulators/sim_device: compared with
// scalar references, and its errors.
#include <gtest/gtest.h>

#include <thread>

#include "multirank/comm/device_rank.hpp"
#include "support/name_by_ranks.hpp"
#include "zr/collective.hpp"

namespace {

using namespace zr::testing;
using zr::host::comm::done_new;
using zr::host::comm::done_poll;
using zr::host::comm::done_release;

class CommDeviceTest : public ::testing::TestWithParam<int> {
 protected:
  // The ranks share two devices.
  void on_ranks(int world, const std::function<void(DeviceRank&)>& body) {
    expect_success(run_sim_ranks(world, [&](const SharedJob& job, Rank& rank) {
      DeviceRank device(job, rank, rank.rank % 2);
      body(device);
    }));
  }
};

TEST_P(CommDeviceTest, EveryOperationMatchesReferenceForEveryType) {
  on_ranks(GetParam(), [](DeviceRank& rank) {
    check_every_operation(rank.bench(), {std::begin(kDtypes), std::end(kDtypes)}, 7, kHomes);
  });
}

TEST_P(CommDeviceTest, ReductionsSupportMinMaxAndAccumulate) {
  on_ranks(GetParam(), [](DeviceRank& rank) {
    const Bench bench = rank.bench();
    Memory memory(bench, 64 << 10);
    check_reductions(bench, memory, {Home::shared, Home::mixed});
  });
}

TEST_P(CommDeviceTest, UpcastsSourcesWithoutIntermediateRounding) {
  on_ranks(GetParam(), [](DeviceRank& rank) {
    const Bench bench = rank.bench();
    Memory memory(bench, 64 << 10);
    check_upcasts(bench, memory, kHomes);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommDeviceTest, ::testing::Values(2, 4), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, CommDeviceTest, ::testing::Values(3), zr::test::NameByRanks());

class CommDeviceLifeTest : public CommDeviceTest {};

// Each collective reads what the one before it wrote; the host does not wait in between.
TEST_F(CommDeviceLifeTest, CollectivesOnTheSameMemoryRunInOrder) {
  on_ranks(3, [](DeviceRank& rank) {
    constexpr int64_t kCount = 5000;
    void* const memory = rank.comm().allocate(4 * kCount);
    std::vector<float> x(kCount, static_cast<float>(rank.rank() + 1));
    rank.stream().upload(x.data(), memory, 4 * kCount);
    const zr_view all = view_on(rank, memory, kCount);
    for (int i = 0; i < 10; ++i) {
      ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "sum")), ZR_OK) << rank.comm().said();
      ASSERT_EQ(rank.submit(zr::broadcast(all, i % 3, "share")), ZR_OK) << rank.comm().said();
    }
    rank.stream().download(memory, x.data(), 4 * kCount);
    float expected = 6;
    for (int i = 1; i < 10; ++i) expected *= 3;
    EXPECT_EQ(x.front(), expected);
    EXPECT_EQ(x.back(), expected);
  });
}

TEST_F(CommDeviceLifeTest, ACompletionIsResolvedWhenTheStreamGetsThere) {
  on_ranks(2, [](DeviceRank& rank) {
    void* const memory = rank.comm().allocate(4000);
    const zr_view all = view_on(rank, memory, 1000);
    zr_done* const done = done_new(rank.comm().host().abi());
    ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "sum"), done), ZR_OK) << rank.comm().said();
    rank.stream().synchronize();
    EXPECT_EQ(done_poll(done, nullptr), ZR_OK);
    done_release(done);
  });
}

TEST_F(CommDeviceLifeTest, RanksThatDisagreeFailAndNameBothOperations) {
  on_ranks(2, [](DeviceRank& rank) {
    const int64_t count = rank.rank() == 0 ? 10 : 20;
    const zr_view all = view_on(rank, rank.comm().allocate(80), count);
    zr_coll coll = zr::all_reduce(all, all, "x");
    coll.fingerprint = static_cast<uint64_t>(count);
    EXPECT_EQ(rank.submit(coll), ZR_MISMATCH);
    EXPECT_EQ(rank.comm().said(),
              "the ranks disagree about a collective: rank 0 issued all_reduce 'x' (fp32, 10 elements), rank 1 issued "
              "all_reduce 'x' (fp32, 20 elements)");
    EXPECT_EQ(rank.submit(zr::barrier("after")), ZR_MISMATCH) << "all later operations fail too";
  });
}

TEST_F(CommDeviceLifeTest, RejectsWhatItDoesNotOffer) {
  on_ranks(2, [](DeviceRank& rank) {
    const zr_view all = view_on(rank, rank.comm().allocate(80), 20);
    EXPECT_EQ(rank.submit(zr::send(all, 1 - rank.rank(), 0, "m")), ZR_UNSUPPORTED);
    EXPECT_EQ(rank.comm().said(), "send 'm': communicator 'shm' has no messages between devices; use a collective");
    EXPECT_EQ(rank.comm().submit(zr::all_reduce(all, all, "x")), ZR_INVALID);
    EXPECT_EQ(rank.comm().said(), "all_reduce 'x': memory of a device needs the stream of the call");
    EXPECT_EQ(rank.submit(zr::all_reduce(all, all, "x")), ZR_OK) << rank.comm().said();
  });
}

// Each planted defect gives a wrong result or ends a rank, with one of these seeds at the latest.
TEST_F(CommDeviceLifeTest, PlantedDefectsAreFound) {
  const auto passes = [](const std::string& defect, int seed) {
    const SharedJob job;
    const auto ranks = run_ranks(2, [&](Rank& rank) {
      ::setenv("ZR_SIM_DEFECT", defect.c_str(), 1);
      ::setenv("ZR_SIM_DELAY_US", "2000", 1);
      ::setenv("ZR_SIM_SEED", std::to_string(2 * seed + rank.rank).c_str(), 1);
      DeviceRank device(job, rank, rank.rank % 2);
      constexpr int64_t kCount = 5000;
      auto* const memory = static_cast<float*>(device.comm().allocate(4 * 2 * kCount));
      std::vector<float> x(kCount, static_cast<float>(rank.rank + 1));
      device.stream().upload(x.data(), memory, 4 * kCount);
      const zr_view sum = view_on(device, memory, kCount), all = view_on(device, memory, 2 * kCount);
      zr_view own = sum;
      own.data = memory + rank.rank * kCount;
      for (int i = 0; i < 8; ++i) {
        device.stream().add_one(memory, kCount);
        device.comm().run(zr::all_reduce(sum, sum, "sum"), device.stream().abi());
        device.comm().run(zr::all_gather(own, all, "gather"), device.stream().abi());
        device.comm().run(zr::broadcast(sum, i % 2, "share"), device.stream().abi());
      }
      device.stream().download(memory, x.data(), 4 * kCount);
      for (const float value : x) rank.give(std::to_string(value) + " ");
    });
    std::string result;
    for (const RankResult& rank : ranks) result += rank.ok() ? rank.gave : "failed";
    return result;
  };
  const std::string right = passes("none", 0);
  EXPECT_EQ(right, passes("none", 1));
  for (const std::string defect : {"wait", "reuse", "early", "stream", "host"}) {
    bool found = false;
    for (int seed = 0; seed < 60 && !found; ++seed) found = passes(defect, seed) != right;
    EXPECT_TRUE(found) << defect;
  }
}

// Rank 1 fails after its peers have seen its announcement: they do not take its part for done.
TEST_F(CommDeviceLifeTest, ARankThatFailsInACollectiveFailsItOnAllRanks) {
  ::setenv("ZR_SIM_DEFECT", "failure", 1);
  on_ranks(2, [](DeviceRank& rank) {
    const zr_view all = view_on(rank, rank.comm().allocate(80), 20);
    const zr_code code = rank.submit(zr::broadcast(all, 0, "x"));
    EXPECT_EQ(code, rank.rank() == 0 ? ZR_COMM : ZR_IO) << rank.comm().said();
    EXPECT_EQ(rank.comm().said(), rank.rank() == 0
                                      ? "rank 1 has closed its communicator while this rank is in barrier 'the end of "
                                        "broadcast 'x''"
                                      : "a planted failure");
    EXPECT_NE(rank.submit(zr::broadcast(all, 0, "x")), ZR_OK);
  });
  ::unsetenv("ZR_SIM_DEFECT");
}

// Rank 1 takes part in nothing: rank 0's call ends, and so does its stream.
TEST_F(CommDeviceLifeTest, AbortEndsCallsAndStreams) {
  on_ranks(2, [](DeviceRank& rank) {
    if (rank.rank() == 1) return;
    const zr_view all = view_on(rank, rank.comm().allocate(80), 20);
    std::thread aborts([&] { rank.comm().api().abort(rank.comm().comm()); });
    EXPECT_NE(rank.submit(zr::all_reduce(all, all, "x")), ZR_OK);
    aborts.join();
    EXPECT_NE(rank.submit(zr::all_reduce(all, all, "x")), ZR_OK);
    rank.stream().synchronize();
  });
}

// As with CUDA, nothing ends a stream's wait for a peer, and freeing memory waits for the stream.
TEST(CommDeviceCloseTest, EndsAlthoughTheStreamWaitsForAPeer) {
  ::setenv("ZR_SIM_DEFECT", "endless", 1);
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    static std::atomic<bool> is_open{false};
    {
      DeviceRank device(job, rank, rank.rank);
      const zr_view all = view_on(device, device.comm().allocate(80), 20);
      if (rank.rank == 1) device.stream().wait_for(is_open);
      EXPECT_EQ(device.submit(zr::all_reduce(all, all, "x")), ZR_OK) << device.comm().said();
    }
    is_open = true;
  }));
  ::unsetenv("ZR_SIM_DEFECT");
}

// The device has 128 MiB: enough for staging memory of 48 MiB, but not of twice as much.
TEST(CommDeviceStagingTest, GrowsByWhatIsNeededIfTheDeviceHasNoMore) {
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    DeviceRank device(job, rank, rank.rank);
    const int64_t count = int64_t{12} << 20;
    const zr_view all = view_on(device, device.stream().allocate(4 * count), count);
    EXPECT_EQ(device.stream().allocate(8 * count), nullptr);
    const std::vector<float> ones(static_cast<std::size_t>(count), 1.0f);
    device.stream().upload(ones.data(), all.data, 4 * count);
    EXPECT_EQ(device.submit(zr::all_reduce(all, all, "x")), ZR_OK) << device.comm().said();
    device.stream().synchronize();
    EXPECT_EQ(SimStream::peek<float>(static_cast<float*>(all.data) + count - 1), 2);
  }));
}

}  // namespace
