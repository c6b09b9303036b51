// comm_shm compared with scalar references: every operation, type, number of ranks and kind of memory.
#include <gtest/gtest.h>

#include "multirank/comm/cases.hpp"
#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"

namespace {

using namespace zr::testing;
using zr::host::comm::done_new;
using zr::host::comm::done_release;

class CommShmTest : public testing::TestWithParam<int> {
 protected:
  void on_ranks(const std::function<void(RawComm&, const Bench&)>& body, RigOptions options = {}) {
    const SharedJob job;
    expect_success(run_ranks(GetParam(), [&](Rank& rank) {
      CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world), options);
      RawComm comm(rig);
      body(comm, {comm.rank(), comm.world(), [&](const zr_coll& coll) { comm.run(coll); },
                  [&](int64_t bytes) { return comm.allocate(bytes); }, [&](void* memory) { comm.free(memory); }});
    }));
  }
};

TEST_P(CommShmTest, EveryOperationMatchesReferenceForEveryType) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    uint64_t seed = 1;
    for (const zr_dtype dtype : kDtypes)
      for (const Home home : {Home::shared, Home::own, Home::mixed})
        for (const Case& c : cases(comm.world(), dtype, 7)) check(bench, memory, c, home, seed += 1000);
  });
}

TEST_P(CommShmTest, ReductionsSupportMinMaxAndAccumulate) {
  on_ranks([](RawComm&, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    check_reductions(bench, memory, {Home::shared, Home::own, Home::mixed});
  });
}

TEST_P(CommShmTest, UpcastsSourcesWithoutIntermediateRounding) {
  on_ranks([](RawComm&, const Bench& bench) {
    Memory memory(bench, 64 << 10);
    check_upcasts(bench, memory, {Home::shared, Home::own, Home::mixed});
  });
}

TEST_P(CommShmTest, TransfersMoreThanStagingBufferHolds) {
  const RigOptions options{.keys = "staging_bytes = \"256KiB\"\n"};
  on_ranks(
      [](RawComm& comm, const Bench& bench) {
        Memory memory(bench, 2 << 20);
        uint64_t seed = 3;
        for (const Home home : {Home::own, Home::mixed})
          for (const Case& c : cases(comm.world(), ZR_F32, comm.world() < 4 ? 1501 : 701))
            check(bench, memory, c, home, seed += 1000);
      },
      options);
}

TEST_P(CommShmTest, SplitsLargeReductionsAcrossThreads) {
  on_ranks(
      [](RawComm& comm, const Bench& bench) {
        if (comm.world() > 3) return;
        Memory memory(bench, 8 << 20);
        for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE_SCATTER, ZR_ALL_GATHER})
          for (const bool in_place : {false, true})
            check(bench, memory,
                  {.op = op, .world = comm.world(), .total = 1300001, .part = 600011, .in_place = in_place},
                  Home::shared, op);
      },
      {.threads = 3});
}

TEST_P(CommShmTest, DeliversMessagesInOrderPerTag) {
  on_ranks([](RawComm& comm, const Bench& bench) {
    if (comm.world() == 1) return;
    constexpr int64_t kCount = 100000;  // more than the staging buffer holds at once
    const int64_t bytes = kCount * 4;
    Memory memory(bench, 4 * bytes);
    const int next = (comm.rank() + 1) % comm.world(), previous = (comm.rank() + comm.world() - 1) % comm.world();
    for (const Home home : {Home::shared, Home::own}) {
      char* out = memory.at(home, 0);
      char* in = memory.at(home, 1);
      std::vector<zr_done*> dones;
      // Sent with tags 5, 6, 5, 6 and received with tags 6, 6, 5, 5: in order within a tag.
      const int tags[] = {5, 6, 5, 6}, wanted[] = {6, 6, 5, 5}, message[] = {1, 3, 0, 2};
      for (int i = 0; i < 4; ++i) {
        const Bytes bytes_out = noise(ZR_F32, kCount, static_cast<uint64_t>(comm.rank() * 10 + i));
        std::copy(bytes_out.begin(), bytes_out.end(), out + i * bytes);
        zr_coll send{};
        send.size = sizeof send;
        send.op = ZR_SEND;
        send.peer = next;
        send.tag = tags[i];
        send.src = {out + i * bytes, kCount, ZR_F32, 0, {1, 0}};
        send.label = "message";
        dones.push_back(done_new(comm.host().abi()));
        ASSERT_EQ(comm.submit(send, dones.back()), ZR_OK) << comm.said();
      }
      for (int i = 0; i < 4; ++i) {
        zr_coll recv{};
        recv.size = sizeof recv;
        recv.op = ZR_RECV;
        recv.peer = previous;
        recv.tag = wanted[i];
        recv.dst = {in + i * bytes, kCount, ZR_F32, 0, {1, 0}};
        recv.label = "message";
        comm.run(recv);
        const Bytes expected = noise(ZR_F32, kCount, static_cast<uint64_t>(previous * 10 + message[i]));
        EXPECT_EQ(0, std::memcmp(in + i * bytes, expected.data(), expected.size())) << "message " << i;
      }
      for (zr_done* done : dones) {
        EXPECT_EQ(comm.finish(done), ZR_OK);
        done_release(done);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommShmTest, testing::Values(1, 2, 3, 4, 5));

}  // namespace
