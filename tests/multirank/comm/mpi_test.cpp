// comm_mpi under mpirun, compared with scalar references: every operation, type and number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>

#include "multirank/comm/mpi_ranks.hpp"
#include "support/name_by_ranks.hpp"

namespace {

using namespace zr::testing;
using testing::HasSubstr;
using zr::host::comm::done_new;
using zr::host::comm::done_release;

class CommMpiTest : public testing::TestWithParam<int> {
 protected:
  void on_ranks(const std::function<void(RawComm&, const Bench&)>& body) {
    on_mpi_ranks(GetParam(), [&](CommRig& rig) {
      RawComm comm(rig);
      const PrivateBench memory(comm);
      body(comm, memory.bench);
    });
  }
};

TEST_P(CommMpiTest, EveryOperationMatchesReferenceForEveryType) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    uint64_t seed = 1;
    for (const zr_dtype dtype : kDtypes)
      for (const Case& c : cases(comm.world(), dtype, 7)) check(bench, memory, c, Home::own, seed += 1000);
  });
}

TEST_P(CommMpiTest, ReductionsSupportMinMaxAndAccumulate) {
  on_ranks([](RawComm&, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    check_reductions(bench, memory, {Home::own});
  });
}

TEST_P(CommMpiTest, UpcastsSourcesWithoutIntermediateRounding) {
  on_ranks([](RawComm&, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    check_upcasts(bench, memory, {Home::own});
  });
}

// Messages of reductions have pieces of 512 KiB.
TEST_P(CommMpiTest, ReducesManyPiecesWithUnevenParts) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    const int64_t total = (int64_t{5} << 19) / 4 + 5;
    Memory memory(bench, 3 << 20);
    std::vector<int64_t> counts(static_cast<std::size_t>(comm.world()), 1);
    counts.back() = total - comm.world() + 1;
    uint64_t seed = 3;
    for (const bool in_place : {false, true}) {
      for (const uint32_t flags : {0u, uint32_t{ZR_COLL_ACCUMULATE}})
        for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE})
          check(bench, memory, {.op = op, .flags = flags, .world = comm.world(), .total = total, .in_place = in_place},
                Home::own, seed += 1000);
      check(bench, memory, {.op = ZR_REDUCE_SCATTER, .world = comm.world(), .counts = counts, .in_place = in_place},
            Home::own, seed += 1000);
    }
  });
}

// Ranks send what they have reduced in messages of 2 MiB, while elements arrive; in place, the results replace these.
TEST_P(CommMpiTest, AllReducesManyMessagesOfResults) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    Memory memory(bench, 20 << 20);
    for (const bool in_place : {false, true}) {
      if (comm.world() > 4 && !in_place) continue;  // both take 40 s with 16 ranks on two cores
      check(bench, memory,
            {.op = ZR_ALL_REDUCE, .world = comm.world(), .total = (int64_t{18} << 20) / 4 + 5, .in_place = in_place},
            Home::own, in_place ? 1000 : 2000);
    }
  });
}

// Each operation reads what the one before it writes, and all are submitted before the first is complete.
TEST_P(CommMpiTest, AsynchronousOperationsOnTheSameMemoryRunInOrder) {
  on_ranks([](RawComm& comm, const Bench&) {
    constexpr int kOperations = 20;
    std::vector<float> x(300000, static_cast<float>(comm.rank() + 1));
    const float ranks = static_cast<float>(comm.world());
    std::vector<zr_done*> dones;
    for (int i = 0; i < kOperations; ++i) {
      const zr_view all = view(x.data(), static_cast<int64_t>(x.size()));
      zr_coll coll = i % 2 ? zr::broadcast(all, i % comm.world(), "share") : zr::all_reduce(all, all, "sum");
      dones.push_back(done_new(comm.host().abi()));
      ASSERT_EQ(comm.submit(coll, dones.back()), ZR_OK) << comm.said();
    }
    for (zr_done* done : dones) {
      ASSERT_EQ(comm.finish(done), ZR_OK) << comm.said();
      done_release(done);
    }
    float expected = ranks * (ranks + 1) / 2;
    for (int i = 2; i < kOperations; i += 2) expected = sum_of_equal(expected, comm.world());
    EXPECT_EQ(x.front(), expected);
    EXPECT_EQ(x.back(), expected);
  });
}

// Every rank sends before it receives, more than MPI buffers, and out of order.
TEST_P(CommMpiTest, MessagesOfEqualTagsMatchInOrderInBothDirections) {
  on_ranks([](RawComm& comm, const Bench&) {
    constexpr int64_t kCount = 400000;
    const int next = (comm.rank() + 1) % comm.world(), before = (comm.rank() + comm.world() - 1) % comm.world();
    std::vector<std::vector<int32_t>> sent, got;
    std::vector<zr_done*> dones;
    const auto start = [&](const zr_coll& coll) {
      dones.push_back(done_new(comm.host().abi()));
      ASSERT_EQ(comm.submit(coll, dones.back()), ZR_OK) << comm.said();
    };
    for (int i = 0; i < 4; ++i) {
      sent.emplace_back(kCount, 100 * comm.rank() + i);
      got.emplace_back(kCount, -1);
    }
    for (int i = 0; i < 4; ++i) start(zr::send(view(sent[size_t(i)].data(), kCount, ZR_I32), next, i % 2, "a message"));
    for (const int i : {1, 0, 3, 2})
      start(zr::recv(view(got[size_t(i)].data(), kCount, ZR_I32), before, i % 2, "a message"));
    for (zr_done* done : dones) {
      ASSERT_EQ(comm.finish(done), ZR_OK) << comm.said();
      done_release(done);
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(got[size_t(i)].front(), 100 * before + i);
      EXPECT_EQ(got[size_t(i)].back(), 100 * before + i);
    }
  });
}

// Rank 0 forwards what it receives, and sends something else to rank 1, which sends only after it has that.
TEST(CommMpiMessageTest, AMessageThatWaitsForMemoryBlocksNoOtherPeer) {
  on_mpi_ranks(3, [](CommRig& rig) {
    RawComm comm(rig);
    int32_t x = comm.rank() == 1 ? 7 : 0, y = comm.rank() == 0 ? 8 : 0;
    if (comm.rank() == 0) {
      Started receive(comm, zr::recv(view(&x, 1, ZR_I32), 1, 0, "a"));
      Started forward(comm, zr::send(view(&x, 1, ZR_I32), 2, 0, "x"));
      Started send(comm, zr::send(view(&y, 1, ZR_I32), 1, 0, "y"));
      for (Started* started : {&receive, &forward, &send}) EXPECT_EQ(started->finish(), ZR_OK) << comm.said();
    } else if (comm.rank() == 1) {
      comm.run(zr::recv(view(&y, 1, ZR_I32), 0, 0, "y"));
      comm.run(zr::send(view(&x, 1, ZR_I32), 0, 0, "a"));
    } else {
      comm.run(zr::recv(view(&x, 1, ZR_I32), 0, 0, "x"));
    }
    EXPECT_EQ(x, 7);
    EXPECT_EQ(y, comm.rank() == 2 ? 0 : 8);
  });
}

TEST(CommMpiMessageTest, OtherTagsAreRejected) {
  on_mpi_ranks(2, [](CommRig& rig) {
    RawComm comm(rig);
    float x = 0;
    EXPECT_EQ(comm.submit(zr::send(view(&x, 1), 1 - comm.rank(), -1, "x")), ZR_UNSUPPORTED);
    EXPECT_THAT(comm.said(), testing::MatchesRegex("comm_mpi has tags from 0 to [0-9]+, but this one is -1"));
    comm.run(zr::barrier("after"));
  });
}

TEST(CommMpiLifeTest, CommunicatorsOfOneProcessAreIndependent) {
  on_mpi_ranks(2, [](CommRig& rig) {
    std::vector<float> x(100000, 1), y(100000, 2);
    auto first = std::make_unique<RawComm>(rig);
    RawComm second(rig);
    const zr_view all_x = view(x.data(), 100000), all_y = view(y.data(), 100000);
    // Each rank submits to the communicators in another order.
    if (first->rank() == 0) {
      Started sum(*first, zr::all_reduce(all_x, all_x, "x"));
      second.run(zr::all_reduce(all_y, all_y, "y"));
      EXPECT_EQ(sum.finish(), ZR_OK);
    } else {
      Started sum(second, zr::all_reduce(all_y, all_y, "y"));
      first->run(zr::all_reduce(all_x, all_x, "x"));
      EXPECT_EQ(sum.finish(), ZR_OK);
    }
    first.reset();
    second.run(zr::all_reduce(all_y, all_y, "y"));
    RawComm(rig).run(zr::all_reduce(all_x, all_x, "x"));
    EXPECT_EQ(x.back(), 4);
    EXPECT_EQ(y.back(), 8);
  });
}

// OpenMPI would write more bytes than the receiver expects. The messages do not match, and the ranks wait until they
// are aborted: with an engine, by the control plane.
TEST(CommMpiLifeTest, RanksThatDisagreeAboutAnOperationWriteNothing) {
  on_mpi_ranks(2, [](CommRig& rig) {
    RawComm comm(rig);
    constexpr int64_t kLess = 100000, kMore = 200000;
    const int64_t count = comm.rank() == 0 ? kLess : kMore;
    std::vector<float> x(kMore, 1), all(4 * kMore, -1);
    Started gather(comm, zr::all_gather(view(x.data(), count), view(all.data(), 2 * count), "x"));
    rig.control()->put("started." + std::to_string(comm.rank()), "");
    rig.control()->get("started." + std::to_string(1 - comm.rank()), std::chrono::seconds(60));
    for (int i = 0; i < 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      ASSERT_EQ(gather.code(), ZR_AGAIN);
    }
    comm.api().abort(comm.comm());
    EXPECT_EQ(gather.finish(), ZR_CANCELLED);
    EXPECT_EQ(comm.submit(zr::barrier("after")), ZR_CANCELLED) << "all later operations fail too";
    for (int64_t i = comm.rank() == 0 ? kLess : 0; i < 4 * kMore; ++i)
      if (comm.rank() == 0 || i < kMore || i >= 2 * kMore) {
        ASSERT_EQ(all[static_cast<std::size_t>(i)], -1) << i;
      }
  });
}

// Rank 1 takes part in nothing.
TEST(CommMpiLifeTest, AbortCancelsWaitsAndWhatIsPending) {
  on_mpi_ranks(2, [](CommRig& rig) {
    RawComm comm(rig);
    if (comm.rank() == 1) return void(rig.control()->get("rank 0 has ended", std::chrono::seconds(60)));
    std::vector<float> x(1000000);
    Started pending(comm, zr::all_reduce(view(x.data(), 1000000), view(x.data(), 1000000), "x"));
    std::thread aborts([&] { comm.api().abort(comm.comm()); });
    EXPECT_EQ(comm.submit(zr::barrier("waits")), ZR_CANCELLED);
    aborts.join();
    EXPECT_EQ(pending.code(), ZR_CANCELLED);
    EXPECT_EQ(comm.submit(zr::barrier("after")), ZR_CANCELLED);
    zr::host::CallError error;
    EXPECT_EQ(comm.api().progress(comm.comm(), &error), ZR_CANCELLED);
    rig.control()->put("rank 0 has ended", "");
  });
}

// Rank 0 would wait for a minute, because rank 1 would wait for it at the end of MPI.
TEST(CommMpiLifeTest, ARankThatExitsWithAnOpenCommunicatorEndsTheJob) {
  if (!std::getenv("OMPI_COMM_WORLD_RANK")) {
    const auto done = shell(
        "timeout 50 " ZR_SOURCE_DIR "/tests/support/mpirun.sh --bind-to none --oversubscribe -n 2 " +
        std::filesystem::read_symlink("/proc/self/exe").string() + " --gtest_filter=CommMpiLifeTest.ARankThatExits*");
    EXPECT_NE(done.code, 124) << done.output;
    return;
  }
  const auto control = zr::host::control::Control::join();
  CommRig rig(control, {.id = "mpi"});
  RawComm comm(rig);
  comm.run(zr::barrier("both"));
  if (comm.rank() == 1) std::exit(0);
  EXPECT_ANY_THROW(control->get("no rank puts this", std::chrono::seconds(60)));
}

TEST(CommMpiLifeTest, CloseCancelsWhatIsPendingAndNoCommunicatorIsOpenedAfterIt) {
  on_mpi_ranks(2, [](CommRig& rig) {
    std::vector<float> x(1000);
    auto comm = std::make_unique<RawComm>(rig);
    zr_done* const done = done_new(rig.host().abi());
    ASSERT_EQ(comm->submit(zr::recv(view(x.data(), 1000), 1 - comm->rank(), 3, "x"), done), ZR_OK);
    comm.reset();
    EXPECT_EQ(zr::host::comm::done_poll(done, nullptr), ZR_CANCELLED);
    done_release(done);
    EXPECT_THROW(RawComm{rig}, zr::Error);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommMpiTest, testing::Values(3, 4), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, CommMpiTest, testing::Values(2, 7, 16), zr::test::NameByRanks());

}  // namespace
