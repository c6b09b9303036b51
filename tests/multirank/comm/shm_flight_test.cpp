// comm_shm operations: asynchronous, in order, and rejected if ranks disagree or arguments are invalid.
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "multirank/comm/shm_ranks.hpp"

namespace {

using namespace zr::testing;
using testing::HasSubstr;
using zr::host::comm::done_new;
using zr::host::comm::done_poll;
using zr::host::comm::done_release;

TEST(CommShmInFlightTest, SubmitDoesNotWaitForSlowPeers) {
  auto* submitted =
      new (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<bool>(false);
  expect_success(on_ranks(2, [=](RawComm& comm, Rank& rank) {
    constexpr int kBuckets = 100, kCount = 5000;  // more buckets than the ring holds
    auto* source = static_cast<float*>(comm.allocate(int64_t{kBuckets} * kCount * 2 * 4));
    auto* reduced = static_cast<float*>(comm.allocate(int64_t{kBuckets} * kCount * 4));
    for (int i = 0; i < kBuckets * kCount * 2; ++i) source[i] = static_cast<float>(i % 1000 + rank.rank);
    barrier(comm);
    while (rank.rank == 1 && !*submitted)
      std::this_thread::yield();  // rank 1 starts only when rank 0 has submitted every bucket
    std::vector<zr_done*> dones;
    for (int b = 0; b < kBuckets; ++b) {
      dones.push_back(done_new(comm.host().abi()));
      const zr_coll coll =
          collective(ZR_REDUCE_SCATTER, source + b * kCount * 2, kCount * 2, reduced + b * kCount, kCount, "bucket");
      ASSERT_EQ(comm.submit(coll, dones.back()), ZR_OK) << comm.said();
    }
    if (rank.rank == 0) {
      EXPECT_EQ(done_poll(dones.front(), nullptr), ZR_AGAIN);
      *submitted = true;
    }
    for (zr_done* done : dones) {
      EXPECT_EQ(comm.finish(done), ZR_OK) << comm.said();
      done_release(done);
    }
    for (int b = 0; b < kBuckets; ++b)
      for (int i = 0; i < kCount; i += 97) {
        const int at = b * kCount * 2 + rank.rank * kCount + i;
        ASSERT_EQ(reduced[b * kCount + i], static_cast<float>(at % 1000) * 2 + 1) << b << " " << i;
      }
  }));
  ::munmap(submitted, 4096);
}

TEST(CommShmInFlightTest, OperationsCompleteInSubmissionOrder) {
  expect_success(on_ranks(3, [](RawComm& comm, Rank& rank) {
    auto* memory = static_cast<float*>(comm.allocate(1 << 20));
    std::vector<zr_done*> dones;
    for (int i = 0; i < 8; ++i) {
      dones.push_back(done_new(comm.host().abi()));
      ASSERT_EQ(comm.submit(collective(ZR_ALL_REDUCE, memory + i * 1000, 1000, memory + i * 1000, 1000, "bucket"),
                            dones.back()),
                ZR_OK);
      if (rank.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      for (std::size_t d = 1; d < dones.size(); ++d)
        if (done_poll(dones[d], nullptr) == ZR_OK) {
          EXPECT_EQ(done_poll(dones[d - 1], nullptr), ZR_OK) << d;
        }
    }
    EXPECT_EQ(comm.finish(dones.back()), ZR_OK);
    for (zr_done* done : dones) {
      EXPECT_EQ(done_poll(done, nullptr), ZR_OK);
      done_release(done);
    }
  }));
}

TEST(CommShmInFlightTest, OperationWaitsForPendingInput) {
  expect_success(on_ranks(3, [](RawComm& comm, Rank& rank) {
    constexpr int64_t kPart = 4096, kAll = 3 * kPart;
    auto* x = static_cast<float*>(comm.allocate(kAll * 4));
    auto* y = static_cast<float*>(comm.allocate(kAll * 4));
    for (int round = 0; round < 20; ++round) {
      for (int64_t i = 0; i < kAll; ++i) x[i] = static_cast<float>(i + rank.rank);
      if (rank.rank == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::vector<zr_done*> dones(3);
      for (auto& done : dones) done = done_new(comm.host().abi());
      // Reduce-scatter in place, gather the parts, reduce the gathered tensor: each reads the previous result.
      ASSERT_EQ(comm.submit(collective(ZR_REDUCE_SCATTER, x, kAll, x + rank.rank * kPart, kPart, "sum"), dones[0]),
                ZR_OK);
      ASSERT_EQ(comm.submit(collective(ZR_ALL_GATHER, x + rank.rank * kPart, kPart, y, kAll, "gather"), dones[1]),
                ZR_OK);
      ASSERT_EQ(comm.submit(collective(ZR_ALL_REDUCE, y, kAll, y, kAll, "again"), dones[2]), ZR_OK);
      for (zr_done* done : dones) {
        EXPECT_EQ(comm.finish(done), ZR_OK);
        done_release(done);
      }
      for (int64_t i = 0; i < kAll; i += 61) ASSERT_EQ(y[i], 3 * static_cast<float>(3 * i + 3)) << round << " " << i;
    }
  }));
}

TEST(CommShmMismatchTest, EveryRankReportsBothOperations) {
  const auto ranks = on_ranks(3, [](RawComm& comm, Rank& rank) {
    auto* memory = static_cast<float*>(comm.allocate(4096));
    barrier(comm);
    zr_done* done = done_new(comm.host().abi());
    const bool odd = rank.rank == 1;
    const zr_coll coll = collective(odd ? ZR_BROADCAST : ZR_ALL_REDUCE, memory, 100, memory, 100,
                                    odd ? "rank 0's weights" : "bucket 3", odd ? 12 : 11);
    zr_code code = comm.submit(coll, done);
    if (code == ZR_OK) code = comm.finish(done);
    EXPECT_EQ(code, ZR_MISMATCH);
    rank.give(comm.said());
    done_release(done);
    EXPECT_EQ(comm.submit(collective(ZR_BARRIER, nullptr, 0, nullptr, 0, "after")), ZR_MISMATCH)
        << "every operation after a mismatch must fail";
  });
  expect_success(ranks);
  for (const RankResult& r : ranks)
    EXPECT_EQ(r.gave,
              "the ranks disagree about a collective: rank 0 issued all_reduce 'bucket 3' (fp32, 100 elements), "
              "rank 1 issued broadcast "
              "'rank 0's weights' (fp32, 100 elements)");
}

TEST(CommShmMismatchTest, EveryRankReportsAllToAllCounts) {
  const auto ranks = on_ranks(3, [](RawComm& comm, Rank& rank) {
    auto* memory = static_cast<float*>(comm.allocate(4096));
    const int64_t to[3] = {2, 2, rank.rank == 0 ? 5 : 2}, from[3] = {2, 2, 2};
    zr_coll coll = collective(ZR_ALL_TO_ALL, memory, 4 + to[2], memory + 100, 6, "expert tokens");
    coll.counts = to;
    coll.recv_counts = from;
    EXPECT_EQ(comm.submit(coll), ZR_MISMATCH);
    rank.give(comm.said());
  });
  expect_success(ranks);
  for (const RankResult& r : ranks)
    EXPECT_THAT(r.gave, testing::AllOf(HasSubstr("all_to_all 'expert tokens'"),
                                       HasSubstr("sends 5 elements to rank 2, which expects 2")));
}

TEST(CommShmMismatchTest, SenderAndReceiverReportMessageLengths) {
  const auto ranks = on_ranks(2, [](RawComm& comm, Rank& rank) {
    auto* memory = static_cast<float*>(comm.allocate(4096));
    zr_coll coll = collective(rank.rank == 0 ? ZR_SEND : ZR_RECV, memory, 10, memory, 12,
                              rank.rank == 0 ? "activations" : "inputs", 0);
    coll.peer = 1 - rank.rank;
    coll.tag = 4;
    EXPECT_EQ(comm.submit(coll), ZR_MISMATCH);
    rank.give(comm.said());
  });
  expect_success(ranks);
  for (const RankResult& r : ranks)
    EXPECT_EQ(
        r.gave,
        "rank 0 sends 'activations' (fp32, 10 elements) with tag 4, rank 1 receives 'inputs' (fp32, 12 elements)");
}

struct Wrong {
  const char* says;
  std::function<void(zr_coll&, float*)> make;
};

TEST(CommShmArgumentTest, ErrorsNameOperationAndReason) {
  const std::vector<Wrong> wrongs{
      {"all_reduce 'w': src and dst have different lengths", [](zr_coll& c, float*) { c.dst.count = 9; }},
      {"all_reduce 'w': src and dst have different types", [](zr_coll& c, float*) { c.dst.dtype = ZR_I32; }},
      {"all_reduce 'w': src and dst overlap, but src is not dst's own range",
       [](zr_coll& c, float* m) { c.dst.data = m + 1; }},
      {"all_reduce 'w': src is not a valid view", [](zr_coll& c, float*) { c.src.data = nullptr; }},
      {"all_reduce 'w': unknown reduction", [](zr_coll& c, float*) { c.reduce = 9; }},
      {"reduce_scatter 'w': the length of dst does not match the counts",
       [](zr_coll& c, float*) {
         c.op = ZR_REDUCE_SCATTER;
         static const int64_t n[] = {4};
         c.counts = n;
         c.src.count = 4;
       }},
      {"all_gather 'w': the length of src does not match the counts",
       [](zr_coll& c, float*) {
         c.op = ZR_ALL_GATHER;
         static const int64_t n[] = {4};
         c.counts = n;
         c.dst.count = 4;
       }},
      {"all_gather 'w': a count is negative",
       [](zr_coll& c, float*) {
         c.op = ZR_ALL_GATHER;
         static const int64_t n[] = {-4};
         c.counts = n;
       }},
      {"broadcast 'w': root is out of range",
       [](zr_coll& c, float*) {
         c.op = ZR_BROADCAST;
         c.root = 1;
       }},
      {"send 'w': peer is out of range or this rank itself", [](zr_coll& c, float*) { c.op = ZR_SEND; }},
      {"unknown operation 'w': unknown operation code", [](zr_coll& c, float*) { c.op = 77; }},
  };
  expect_success(on_ranks(1, [&](RawComm& comm, Rank&) {
    auto* memory = static_cast<float*>(comm.allocate(4096));
    for (const Wrong& wrong : wrongs) {
      zr_coll coll = collective(ZR_ALL_REDUCE, memory, 10, memory + 100, 10, "w");
      wrong.make(coll, memory);
      EXPECT_EQ(comm.submit(coll), ZR_INVALID) << wrong.says;
      EXPECT_EQ(comm.said(), wrong.says);
    }
    EXPECT_EQ(comm.submit(collective(ZR_ALL_REDUCE, memory, 10, memory + 100, 10, "right")), ZR_OK)
        << "a rejected call must not affect later calls";
  }));
}

}  // namespace
