// comm_mpi for memory of a device, on the simulated device of tests/simulators/sim_device: compared with scalar
// references, and its errors. The ranks pretend to be on several hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "multirank/comm/device_rank.hpp"
#include "multirank/comm/mpi_ranks.hpp"
#include "support/name_by_ranks.hpp"

namespace {

using namespace zr::testing;
using testing::HasSubstr;
using zr::host::comm::done_new;
using zr::host::comm::done_poll;
using zr::host::comm::done_release;

// `hosts`: the number of ranks on each.
void on_device_ranks(const std::vector<int>& hosts, const std::function<void(DeviceRank&)>& body) {
  ::setenv("ZR_SIM_DELAY_US", "100", 1);
  ::setenv("ZR_SIM_BYTES", "134217728", 1);
  std::vector<int> host_of_rank;
  for (std::size_t host = 0; host < hosts.size(); ++host)
    host_of_rank.insert(host_of_rank.end(), static_cast<std::size_t>(hosts[host]), static_cast<int>(host));
  on_mpi_processes(
      std::accumulate(hosts.begin(), hosts.end(), 0),
      [&](const std::shared_ptr<zr::host::control::Control>& control) {
        ::setenv("ZR_SIM_SEED", std::to_string(control->rank() + 1).c_str(), 1);
        DeviceRank rank(control, control->rank() % 2, {.id = "mpi", .keys = kAllSizes});
        body(rank);
      },
      host_of_rank);
}

class CommMpiDeviceTest : public testing::TestWithParam<std::vector<int>> {};

TEST_P(CommMpiDeviceTest, EveryOperationMatchesReferenceForEveryType) {
  on_device_ranks(GetParam(), [](DeviceRank& rank) {
    check_every_operation(rank.bench(), {std::begin(kDtypes), std::end(kDtypes)}, 7, kHomes);
  });
}

TEST_P(CommMpiDeviceTest, ReductionsSupportMinMaxAndAccumulate) {
  on_device_ranks(GetParam(), [](DeviceRank& rank) {
    const Bench bench = rank.bench();
    Memory memory(bench, 64 << 10);
    check_reductions(bench, memory, {Home::shared, Home::mixed});
  });
}

TEST_P(CommMpiDeviceTest, UpcastsSourcesWithoutIntermediateRounding) {
  on_device_ranks(GetParam(), [](DeviceRank& rank) {
    const Bench bench = rank.bench();
    Memory memory(bench, 64 << 10);
    check_upcasts(bench, memory, kHomes);
  });
}

// Quantized collectives and sums in any order have the same bits in memory of the device as in host memory, where
// CommMpiInexactTest compares them with scalar code.
TEST_P(CommMpiDeviceTest, InexactOperationsHaveTheBitsOfHostMemory) {
  on_device_ranks(GetParam(), [](DeviceRank& rank) {
    RawComm on_host(rank.rig());
    const int world = rank.world();
    constexpr int64_t kPart = 20011;
    const int64_t total = kPart * world;
    const auto values = [&](zr_dtype dtype) {
      std::vector<char> bytes(static_cast<std::size_t>(total * width_of(dtype)));
      for (int64_t i = 0; i < total; ++i)
        downcast(dtype, static_cast<float>((i * 7919 + rank.rank() * 104729) % 10007) / 10007 - 0.5f,
                 bytes.data() + i * width_of(dtype));
      return bytes;
    };
    const auto check = [&](zr_coll coll, std::vector<char>& dst, const std::string& text) {
      std::vector<char> expected = dst;
      zr_coll of_host = coll;
      of_host.dst.data = expected.data();
      on_host.run(of_host);
      rank.run(coll);
      EXPECT_TRUE(dst == expected) << text;
    };
    for (const uint32_t flags : {uint32_t{ZR_COLL_INT8}, uint32_t{ZR_COLL_INT4}, uint32_t{ZR_COLL_ANY_ORDER}})
      for (const zr_dtype dtype : {ZR_F32, ZR_BF16}) {
        const std::string text = std::to_string(flags) + ", dtype " + std::to_string(dtype);
        std::vector<char> src = values(dtype), part(src.size() / static_cast<std::size_t>(world)), all(src.size());
        for (const uint32_t accumulate : {uint32_t{0}, uint32_t{ZR_COLL_ACCUMULATE}}) {
          zr_coll sum = zr::reduce_scatter(view(src.data(), total, dtype), view(part.data(), kPart, dtype), "g");
          sum.flags = flags | accumulate;
          check(sum, part, "reduce_scatter " + text);
        }
        zr_coll sum = zr::all_reduce(view(src.data(), total, dtype), view(all.data(), total, dtype), "g");
        sum.flags = flags;
        check(sum, all, "all_reduce " + text);
        if (flags == ZR_COLL_ANY_ORDER) continue;
        zr_coll gather = zr::all_gather(view(src.data(), kPart, dtype), view(all.data(), total, dtype), "w");
        gather.flags = flags;
        check(gather, all, "all_gather " + text);
      }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommMpiDeviceTest, testing::Values(std::vector<int>{1}, std::vector<int>{1, 1}),
                         zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, CommMpiDeviceTest, testing::Values(std::vector<int>{3}, std::vector<int>{2, 2}),
                         zr::test::NameByRanks());

// Each collective reads what the one before it wrote; the host does not wait in between. The last calls return before
// the device has begun.
TEST(CommMpiDeviceLifeTest, CallsDoNotWaitForTheDevice) {
  on_device_ranks({1, 2}, [](DeviceRank& rank) {
    constexpr int64_t kCount = 5000;
    void* const memory = rank.comm().allocate(4 * kCount);
    EXPECT_EQ(SimStream::peek<float>(memory), 0) << "memory is zeroed";
    std::vector<float> x(kCount, static_cast<float>(rank.rank() + 1));
    rank.stream().upload(x.data(), memory, 4 * kCount);
    const zr_view all = view_on(rank, memory, kCount);
    std::atomic<bool> is_open{false};
    rank.stream().wait_for(is_open);
    for (int i = 0; i < 10; ++i) {
      ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "sum")), ZR_OK) << rank.comm().said();
      ASSERT_EQ(rank.submit(zr::broadcast(all, i % 3, "share")), ZR_OK) << rank.comm().said();
    }
    EXPECT_EQ(SimStream::peek<float>(memory), static_cast<float>(rank.rank() + 1));
    is_open = true;
    rank.stream().download(memory, x.data(), 4 * kCount);
    float expected = 6;
    for (int i = 1; i < 10; ++i) expected *= 3;
    EXPECT_EQ(x.front(), expected);
    EXPECT_EQ(x.back(), expected);
  });
}

TEST(CommMpiDeviceLifeTest, ACompletionIsResolvedWhenTheStreamGetsThere) {
  on_device_ranks({1, 1}, [](DeviceRank& rank) {
    const zr_view all = view_on(rank, rank.comm().allocate(4000), 1000);
    std::atomic<bool> is_open{false};
    rank.stream().wait_for(is_open);
    zr_done* const done = done_new(rank.comm().host().abi());
    ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "sum"), done), ZR_OK) << rank.comm().said();
    EXPECT_EQ(done_poll(done, nullptr), ZR_AGAIN);
    is_open = true;
    rank.stream().synchronize();
    EXPECT_EQ(done_poll(done, nullptr), ZR_OK);
    done_release(done);
  });
}

// Copies of memory of the device are used again, counted, and freed with the communicator.
TEST(CommMpiDeviceLifeTest, UsesItsCopiesAgain) {
  on_device_ranks({1, 1}, [](DeviceRank& rank) {
    const auto bytes = [&] {
      int64_t total = 0;
      for (const auto& [tag, held] : rank.rig().ledger().holders())
        if (tag == "MPI: copies of memory of the device") total += held;
      return total;
    };
    {
      RawComm other(rank.rig(), rank.stream().device());
      const zr_view all = view_on(rank, other.allocate(4 * 10000), 10000);
      for (int i = 0; i < 20; ++i) {
        ASSERT_EQ(other.submit(zr::all_reduce(all, all, "sum"), nullptr, rank.stream().abi()), ZR_OK) << other.said();
        rank.stream().synchronize();
      }
      EXPECT_EQ(bytes(), 40192) << "one block, a multiple of 256 bytes";
    }
    EXPECT_EQ(bytes(), 0);
  });
}

// A collective that the communicator does not offer changes nothing.
TEST(CommMpiDeviceLifeTest, ContinuesAfterAnUnsupportedCollective) {
  on_device_ranks({1, 1}, [](DeviceRank& rank) {
    const zr_view all = view_on(rank, rank.comm().allocate(4000), 1000);
    zr_coll coll = zr::all_gather(view_on(rank, rank.comm().allocate(2000), 500), all, "shared");
    coll.flags = ZR_COLL_SHARED;
    EXPECT_EQ(rank.submit(coll), ZR_UNSUPPORTED);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(rank.submit(zr::all_reduce(all, all, "x")), ZR_OK) << rank.comm().said();
    rank.stream().synchronize();
  });
}

// The stream continues, completions are resolved, and the failure is an error of the next calls.
TEST(CommMpiDeviceLifeTest, AbortEndsWhatStreamsWaitFor) {
  on_device_ranks({1, 1}, [](DeviceRank& rank) {
    const zr_view all = view_on(rank, rank.comm().allocate(4000), 1000);
    if (rank.rank() == 0) {
      zr_done* const done = done_new(rank.comm().host().abi());
      ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "alone"), done), ZR_OK) << rank.comm().said();
      EXPECT_EQ(done_poll(done, nullptr), ZR_AGAIN);
      rank.comm().api().abort(rank.comm().comm());
      rank.stream().synchronize();
      EXPECT_EQ(done_poll(done, nullptr), ZR_CANCELLED);
      done_release(done);
      EXPECT_EQ(rank.submit(zr::all_reduce(all, all, "after")), ZR_CANCELLED);
      EXPECT_THAT(rank.comm().said(), HasSubstr("the communicator was aborted"));
    }
  });
}

TEST(CommMpiDeviceLifeTest, RejectsWhatItDoesNotOffer) {
  on_device_ranks({1, 1}, [](DeviceRank& rank) {
    const zr_view all = view_on(rank, rank.comm().allocate(80), 20);
    EXPECT_EQ(rank.submit(zr::send(all, 1 - rank.rank(), 0, "m")), ZR_UNSUPPORTED);
    EXPECT_EQ(rank.comm().said(), "send 'm': communicator 'mpi' has no messages between devices; use a collective");
    EXPECT_EQ(rank.comm().submit(zr::all_reduce(all, all, "x")), ZR_INVALID);
    EXPECT_EQ(rank.comm().said(), "all_reduce 'x': memory of a device needs the stream of the call");
    EXPECT_EQ(rank.submit(zr::all_reduce(all, all, "x")), ZR_OK) << rank.comm().said();
    SimStream other(rank.stream().device().id, 1);
    EXPECT_EQ(rank.comm().submit(zr::all_reduce(all, all, "x"), nullptr, other.abi()), ZR_UNSUPPORTED);
    EXPECT_EQ(rank.comm().said(), "all_reduce 'x': communicator 'mpi' has one stream per device");
    rank.stream().synchronize();
  });
}

}  // namespace
