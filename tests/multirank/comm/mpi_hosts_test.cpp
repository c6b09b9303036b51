// comm_mpi with several ranks on a host: the same results, over shared memory within a host. Ranks that have the same
// ZR_HOST_ID are on one host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "multirank/comm/mpi_ranks.hpp"
#include "support/name_by_ranks.hpp"

namespace {

using namespace zr::testing;
using testing::HasSubstr;

std::vector<int> hosts_of(const std::vector<int>& ranks_per_host) {
  std::vector<int> hosts;
  for (std::size_t host = 0; host < ranks_per_host.size(); ++host)
    hosts.insert(hosts.end(), static_cast<std::size_t>(ranks_per_host[host]), static_cast<int>(host));
  return hosts;
}

// Memory of the extension "zr.communicator.shared_weights/1".
struct SharedMemory {
  SharedMemory(RawComm& comm, int64_t bytes) : comm(comm) {
    zr::host::CallError error;
    zr::host::check(comm.shared().alloc(comm.comm(), static_cast<uint64_t>(bytes), &writer, &reader, &error), error,
                    "alloc");
  }
  ~SharedMemory() { comm.shared().free(comm.comm(), writer); }
  SharedMemory(const SharedMemory&) = delete;
  RawComm& comm;
  void* writer = nullptr;
  const void* reader = nullptr;
};

// The parameter: the number of ranks on each host.
class CommMpiLevelsTest : public testing::TestWithParam<std::vector<int>> {
 protected:
  // The memory of the test cases is shared with the peers of the host, or private.
  void on_ranks(const std::function<void(RawComm&, const Bench&)>& body) {
    const std::vector<int> hosts = hosts_of(GetParam());
    on_mpi_ranks(
        static_cast<int>(hosts.size()),
        [&](CommRig& rig) {
          RawComm comm(rig);
          body(comm, {comm.rank(), comm.world(), [&](const zr_coll& coll) { comm.run(coll); },
                      [&](int64_t bytes) { return comm.allocate(bytes); }, [&](void* data) { comm.free(data); }});
        },
        kAllSizes, hosts);
  }
};

TEST_P(CommMpiLevelsTest, EveryOperationMatchesReferenceForEveryType) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    uint64_t seed = 1;
    for (const zr_dtype dtype : kDtypes)
      for (const Case& c : cases(comm.world(), dtype, 7))
        for (const Home home : {Home::shared, Home::mixed}) check(bench, memory, c, home, seed += 1000);
  });
}

TEST_P(CommMpiLevelsTest, ReductionsSupportMinMaxAndAccumulate) {
  on_ranks([](RawComm&, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    check_reductions(bench, memory, {Home::shared, Home::own});
  });
}

TEST_P(CommMpiLevelsTest, UpcastsSourcesWithoutIntermediateRounding) {
  on_ranks([](RawComm&, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    check_upcasts(bench, memory, {Home::shared, Home::own});
  });
}

// Sums pass from host to host in pieces of 131 072 elements, of which a rank has at most 8 at a time.
TEST_P(CommMpiLevelsTest, SumsManyPiecesWithUnevenParts) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    const int64_t total = int64_t{9} * 131072 + 5;
    Memory memory(bench, total * 4);
    std::vector<int64_t> first(static_cast<std::size_t>(comm.world()), 1), last = first;
    first.front() = last.back() = total - comm.world() + 1;
    uint64_t seed = 3;
    const auto run = [&](Case c, zr_dtype dtype, bool in_place) {
      c.src = c.dst = dtype;
      c.world = comm.world();
      c.in_place = in_place;
      check(bench, memory, c, Home::shared, seed += 1000);
    };
    for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE, ZR_BROADCAST}) run({.op = op, .total = total}, ZR_BF16, false);
    run({.op = ZR_ALL_REDUCE, .total = total}, ZR_F32, true);
    for (const auto& counts : {first, last, std::vector<int64_t>{}}) {
      const Case sum{.op = ZR_REDUCE_SCATTER, .counts = counts, .part = total / comm.world()};
      run(sum, ZR_F32, true);
      run(sum, ZR_BF16, false);
    }
    run({.op = ZR_REDUCE_SCATTER, .flags = ZR_COLL_ACCUMULATE, .counts = first}, ZR_BF16, false);
    run({.op = ZR_REDUCE_SCATTER, .flags = ZR_COLL_ACCUMULATE, .counts = last}, ZR_F32, false);
    for (const auto& counts : {first, last}) run({.op = ZR_ALL_GATHER, .counts = counts}, ZR_F32, true);
  });
}

// Each operation reads what the one before it writes, and all are submitted before the first is complete.
TEST_P(CommMpiLevelsTest, AsynchronousOperationsOnTheSameMemoryRunInOrder) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    constexpr int kOperations = 20;
    constexpr int64_t kCount = 300000;
    auto* const x = static_cast<float*>(bench.allocate(kCount * 4));
    std::fill_n(x, kCount, static_cast<float>(comm.rank() + 1));
    const auto ranks = static_cast<float>(comm.world());
    std::vector<std::unique_ptr<Started>> started;
    for (int i = 0; i < kOperations; ++i) {
      const zr_view all = view(x, kCount);
      started.push_back(std::make_unique<Started>(
          comm, i % 2 ? zr::broadcast(all, i % comm.world(), "share") : zr::all_reduce(all, all, "sum")));
    }
    for (const auto& operation : started) ASSERT_EQ(operation->finish(), ZR_OK) << comm.said();
    float expected = ranks * (ranks + 1) / 2;
    for (int i = 2; i < kOperations; i += 2) expected = sum_of_equal(expected, comm.world());
    EXPECT_EQ(x[0], expected);
    EXPECT_EQ(x[kCount - 1], expected);
    bench.free(x);
  });
}

// Gathers overlap with a sum, and with each other; ranks submit without waiting.
TEST_P(CommMpiLevelsTest, OperationsOnOtherMemoryOverlap) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    constexpr int64_t kPart = 50000;
    constexpr int kRounds = 6;
    const int64_t total = kPart * comm.world();
    auto* const memory = static_cast<float*>(bench.allocate(2 * kRounds * total * 4));
    std::vector<std::unique_ptr<Started>> started;
    for (int i = 0; i < kRounds; ++i) {
      float* const sums = memory + 2 * i * total;
      float* const parts = sums + total;
      std::fill_n(sums, total, static_cast<float>(i + comm.rank()));
      std::fill_n(parts + comm.rank() * kPart, kPart, static_cast<float>(100 * i + comm.rank()));
      const zr_view own = view(sums + comm.rank() * kPart, kPart);
      started.push_back(std::make_unique<Started>(comm, zr::reduce_scatter(view(sums, total), own, "sum")));
      const zr_view part = view(parts + comm.rank() * kPart, kPart);
      started.push_back(std::make_unique<Started>(comm, zr::all_gather(part, view(parts, total), "gather")));
    }
    for (const auto& operation : started) ASSERT_EQ(operation->finish(), ZR_OK) << comm.said();
    const int world = comm.world();
    for (int i = 0; i < kRounds; ++i) {
      const float* const sums = memory + 2 * i * total + comm.rank() * kPart;
      EXPECT_EQ(sums[0], static_cast<float>(i * world + world * (world - 1) / 2));
      EXPECT_EQ(sums[kPart - 1], sums[0]);
      for (int rank = 0; rank < world; ++rank)
        EXPECT_EQ(memory[(2 * i + 1) * total + rank * kPart + kPart - 1], static_cast<float>(100 * i + rank));
    }
    bench.free(memory);
  });
}

TEST_P(CommMpiLevelsTest, RanksOfAHostShareWeights) {
  on_ranks([](RawComm& comm, const Bench&) {
    const auto hosts = hosts_of(GetParam());
    const int own_host = hosts[static_cast<std::size_t>(comm.rank())];
    std::vector<int64_t> counts;  // from none to several pieces
    for (int rank = 0; rank < comm.world(); ++rank) counts.push_back(rank * (rank == 2 ? 0 : 150001));
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const auto first_of = [&](int rank) { return std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0}); };
    const SharedMemory memory(comm, 2 * total * 4);
    auto* const writer = static_cast<float*>(memory.writer);
    const auto* const reader = static_cast<const volatile float*>(memory.reader);
    const auto value = [](int round, int half, int64_t i) {
      return static_cast<float>(1000000 * round + 7 * half + i);
    };
    for (int round = 0; round < 3; ++round) {
      std::vector<std::unique_ptr<Started>> started;
      const int64_t first = first_of(comm.rank()), count = counts[static_cast<std::size_t>(comm.rank())];
      for (int half = 0; half < 2; ++half) {
        float* const all = writer + half * total;
        for (int64_t i = first; i < first + count; ++i) all[i] = value(round, half, i);
        started.push_back(std::make_unique<Started>(comm, zr::all_gather(view(all + first, count), view(all, total),
                                                                         "weights", counts.data(), ZR_COLL_SHARED)));
      }
      for (const auto& gather : started) ASSERT_EQ(gather->finish(), ZR_OK) << comm.said();
      for (int half = 0; half < 2; ++half)
        for (int64_t i = 0; i < total; ++i)
          ASSERT_EQ(reader[half * total + i], value(round, half, i)) << round << " " << half << " " << i;
      comm.run(zr::barrier("read"));
    }
    // The first host writes where the others do not see it.
    if (comm.rank() == 0) writer[0] = 7;
    comm.run(zr::barrier("written"));
    EXPECT_EQ(reader[0], own_host == 0 ? 7 : value(2, 0, 0));
    comm.run(zr::barrier("compared"));
  });
}

// With one rank on the first host and three on the second, each way of a sum occurs: through hosts and as elements,
// before and after the host that needs it.
INSTANTIATE_TEST_SUITE_P(Ranks, CommMpiLevelsTest, testing::Values(std::vector<int>{1, 3}), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, CommMpiLevelsTest,
                         testing::Values(std::vector<int>{2, 2}, std::vector<int>{3, 1}, std::vector<int>{2, 1, 1},
                                         std::vector<int>{1, 3, 2}, std::vector<int>{4, 1, 3, 1, 2},
                                         std::vector<int>{4, 4, 4, 4}),
                         zr::test::NameByRanks());

// The ranks of a host compare what they call.
TEST(CommMpiHierarchyTest, ARankThatDisagreesIsNamedByItsNumberInTheJob) {
  on_mpi_ranks(3,
               [](CommRig& rig) {
                 RawComm comm(rig);
                 std::vector<float> x(10);
                 const auto submit = [&](int64_t count) {
                   zr_coll coll = zr::broadcast(view(x.data(), count), 0, comm.rank() == 2 ? "y" : "x");
                   coll.fingerprint = comm.rank() == 2 && count == 10 ? 2 : 1;
                   return comm.submit(coll);
                 };
                 EXPECT_EQ(submit(9), ZR_OK) << "fewer bytes than hierarchy_min_bytes";
                 const zr_code code = submit(10);
                 if (comm.rank() == 0) return;  // has no peer on its host
                 EXPECT_EQ(code, ZR_MISMATCH);
                 EXPECT_THAT(comm.said(),
                             HasSubstr("rank 1 issued broadcast 'x' (fp32, 10 elements), rank 2 issued broadcast "
                                       "'y' (fp32, 10 elements)"));
               },
               "hierarchy_min_bytes = 40\n", {0, 1, 1});
}

// Pieces of two peers take 2 MiB, sums 6 MiB, and announcements of two ranks a little.
TEST(CommMpiHierarchyTest, CountsTheMemoryOfTheRanksOfAHost) {
  on_mpi_ranks(3,
               [](CommRig& rig) {
                 const auto held = [&] {
                   return rig.ledger().held(zr::host::Tier::host, zr::host::MemoryKind::communicator);
                 };
                 const int64_t before = held();
                 const auto comm = std::make_unique<RawComm>(rig);
                 const int64_t rest = held() - before - (int64_t{8} << 20);
                 EXPECT_GT(rest, int64_t{1} << 20);
                 EXPECT_LT(rest, (int64_t{1} << 20) + (64 << 10));
                 comm->run(zr::barrier("open"));
               },
               "staging_bytes = \"1MiB\"\n", {0, 0, 1});
}

// Rank 0 has done its work on sums when the second rank of its host, which owns many pieces, still needs its messages.
TEST(CommMpiHierarchyTest, MessagesAdvanceWhileARankWaitsForItsHostOnly) {
  on_mpi_ranks(7,
               [](CommRig& rig) {
                 RawComm comm(rig);
                 constexpr int64_t kPiece = 131072;
                 std::vector<int64_t> counts(7, 0);
                 counts[0] = kPiece;
                 counts[1] = 20 * kPiece;
                 const int64_t total = 21 * kPiece;
                 auto* const x = static_cast<float*>(comm.allocate(total * 4));
                 std::fill_n(x, total, static_cast<float>(comm.rank() + 1));
                 const int64_t first = comm.rank() == 0 ? 0 : kPiece,
                               count = counts[static_cast<std::size_t>(comm.rank())];
                 for (int i = 0; i < 2; ++i) {
                   Started sum(comm, zr::reduce_scatter(view(x, total), view(x + (count ? first : total), count), "sum",
                                                        0, counts.data()));
                   ASSERT_EQ(sum.finish(), ZR_OK) << comm.said();
                   if (count > 0) {
                     EXPECT_EQ(x[first + count - 1], i == 0 ? 28 : 28 + 27 - comm.rank());
                   }
                 }
               },
               kAllSizes, {0, 0, 0, 0, 1, 1, 1});
}

TEST(CommMpiHierarchyTest, AbortCancelsASumThatWaitsForAnotherHost) {
  on_mpi_ranks(3,
               [](CommRig& rig) {
                 RawComm comm(rig);
                 if (comm.rank() == 0)
                   return void(rig.control()->get("the others have ended", std::chrono::seconds(60)));
                 std::vector<float> x(1000000);
                 Started pending(comm, zr::all_reduce(view(x.data(), 1000000), view(x.data(), 1000000), "x"));
                 comm.api().abort(comm.comm());
                 EXPECT_EQ(pending.finish(), ZR_CANCELLED);
                 EXPECT_EQ(comm.submit(zr::barrier("after")), ZR_CANCELLED);
                 if (comm.rank() == 1) rig.control()->get("rank 2 has ended", std::chrono::seconds(60));
                 rig.control()->put(comm.rank() == 1 ? "the others have ended" : "rank 2 has ended", "");
               },
               kAllSizes, {0, 1, 1});
}

TEST(CommMpiHierarchyTest, SharesWeightsIfAHostHasSeveralRanks) {
  on_mpi_ranks(2,
               [](CommRig& rig) {
                 const auto obstacle = [&](const std::vector<int32_t>& ranks) {
                   return zr::host::comm::sharing_obstacle(rig.instance(), ranks);
                 };
                 EXPECT_EQ(obstacle({2, 2}), "");
                 EXPECT_EQ(obstacle({1, 1, 3}), "");
                 EXPECT_EQ(obstacle({1, 1}), "every host has one rank");
                 EXPECT_EQ(obstacle({4}), "communicator 'mpi' shares memory on several hosts only");
                 RawComm comm(rig);
                 std::vector<float> x(2);
                 const zr_view own = view(x.data() + comm.rank(), 1);
                 EXPECT_EQ(comm.submit(zr::all_gather(own, view(x.data(), 2), "x", nullptr, ZR_COLL_SHARED)),
                           ZR_UNSUPPORTED);
                 EXPECT_THAT(comm.said(), HasSubstr("the ranks of this job do not share the memory of their hosts"));
               },
               kAllSizes, {0, 1});
}

TEST(CommMpiHierarchyTest, WarnsIfRanksOfAHostDoNotFollowEachOther) {
  on_mpi_ranks(
      3,
      [](CommRig& rig) {
        testing::internal::CaptureStderr();
        RawComm comm(rig);
        const std::string said = testing::internal::GetCapturedStderr();
        const std::string warning =
            "communicator \"mpi\": ranks 0 and 2 are on one host, but rank 1 is not: collectives do not use the "
            "shared memory of hosts, and more bytes pass between them; number the ranks host by host (mpirun --map-by "
            "slot, srun --distribution=block)";
        EXPECT_EQ(said.find(warning) != std::string::npos, comm.rank() == 0) << said;
        std::vector<float> x(10, 1);
        comm.run(zr::all_reduce(view(x.data(), 10), view(x.data(), 10), "x"));
        EXPECT_EQ(x[9], 3);
      },
      kAllSizes, {0, 1, 0});
}

}  // namespace
