// CommRuntime when ranks issue different collectives, are late, die or pass invalid arguments: every rank fails with
// the reason.
#include <thread>

#include "comm/collective_staging.hpp"
#include "support/comm_rank.hpp"

namespace {

using namespace zr::testing;
using testing::AllOf;
using testing::HasSubstr;
namespace exit_code = zr::exit_code;

TEST(CommRuntimeFailureTest, EveryRankReportsMismatch) {
  expect_success(on_ranks(3, {}, [](CommRank& self) {
    float* x = self.floats(100);
    self.comm.barrier("start");
    const zr_coll coll =
        collective(ZR_ALL_REDUCE, view(x, 100), view(x, 100), self.rank.rank == 2 ? "bucket 4" : "bucket 3");
    const auto act = [&] { self.comm.run(coll); };
    expect_failure(
        act, exit_code::peer_lost,
        AllOf(
            HasSubstr("rank 0 issued all_reduce 'bucket 3' (fp32, 100 elements), rank 2 issued all_reduce 'bucket 4'"),
            HasSubstr("rank 1: ")));
    expect_failure(act, exit_code::peer_lost, HasSubstr("rank 2 issued all_reduce 'bucket 4'"));
  }));
}

TEST(CommRuntimeFailureTest, ReportsTimeout) {
  for (const bool async : {false, true}) {
    expect_success(on_ranks(2, {.timeout = std::chrono::milliseconds(300)}, [&](CommRank& self) {
      float* x = self.floats(100);
      self.comm.barrier("start");
      if (self.rank.rank == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      const zr_coll coll = collective(ZR_ALL_REDUCE, view(x, 100), view(x, 100), "bucket 7");
      const auto start = std::chrono::steady_clock::now();
      const auto says =
          AllOf(HasSubstr("waited longer than communicator.timeout (0.3s) in all_reduce 'bucket 7' (fp32, 100)"),
                HasSubstr("rank 0: 2 waiting in all_reduce 'bucket 7' (fp32, 100)"));
      if (!async) {
        expect_failure([&] { self.comm.run(coll); }, exit_code::peer_lost, says);
      } else {
        zr::host::CallError error;
        zr_done* done = zr::host::comm::done_new(self.rig.host().abi());
        ASSERT_EQ(self.comm.ref().api->submit(self.comm.ref().comm, &coll, nullptr, done, &error), ZR_OK);
        EXPECT_NE(self.comm.wait(done, -1, &error), ZR_OK);
        expect_failure([&] { std::rethrow_exception(self.comm.take_failure()); }, exit_code::peer_lost, says);
        zr::host::comm::done_release(done);
      }
      const auto waited = std::chrono::steady_clock::now() - start;
      EXPECT_GT(waited, std::chrono::milliseconds(290));
      EXPECT_LT(waited, std::chrono::milliseconds(1400));
    }));
  }
}

TEST(CommRuntimeFailureTest, SharedMemoryIsNotAwaitedLongerThanTheTimeout) {
  expect_success(on_ranks(2, {.timeout = std::chrono::milliseconds(300)}, [](CommRank& self) {
    self.comm.barrier("start");
    if (self.rank.rank == 0) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    const auto start = std::chrono::steady_clock::now();
    expect_failure(
        [&] { self.comm.allocate_shared(4096, 2048, zr::host::Tier::host, zr::host::MemoryKind::other, "test"); },
        exit_code::peer_lost,
        AllOf(HasSubstr("waited longer than communicator.timeout (0.3s) in the allocation of memory that the ranks of "
                        "a host share"),
              HasSubstr("rank 1: ")));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1400));
  }));
}

// Stands in for the staging of disk-backed buffers and records which collectives begin and end.
struct Watched : zr::host::comm::CollectiveStaging {
  uint64_t stage(zr_coll&) override { return ++entered; }
  void unstage(uint64_t number, bool well) noexcept override { left.emplace_back(number, well); }
  uint64_t entered = 0;
  std::vector<std::pair<uint64_t, bool>> left;
};

TEST(CommRuntimeFailureTest, FailedSubmitReleasesStaging) {
  for (const bool async : {false, true})
    expect_success(on_ranks(2, {}, [&](CommRank& self) {
      SharedControl control(self.job, self.rank.rank, self.rank.world);
      if (self.rank.rank == 1) return control.put("ready", "");  // issues no collective that the abort could cancel
      control.get("ready", std::chrono::seconds(10));
      float* x = self.floats(100);
      Watched watched;
      self.comm.set_collective_staging(&watched);
      self.comm.abort();  // from now on the plug-in fails every submit
      zr::host::CallError error;
      zr_done* done = async ? zr::host::comm::done_new(self.rig.host().abi()) : nullptr;
      const zr_coll coll = collective(ZR_ALL_REDUCE, view(x, 100), view(x, 100), "bucket 7");
      EXPECT_NE(self.comm.ref().api->submit(self.comm.ref().comm, &coll, nullptr, done, &error), ZR_OK);
      EXPECT_EQ(watched.entered, 1u);
      EXPECT_EQ(watched.left, (std::vector<std::pair<uint64_t, bool>>{{1, false}}))
          << (async ? "asynchronous" : "blocking");
      zr::host::comm::done_release(done);
      self.comm.set_collective_staging(nullptr);
    }));
}

// True if a rank's reported activity is waiting in its collective with that sequence number.
bool waits_in(const SharedJob& job, int rank, const std::string& number) {
  return std::string(job.page().doing[rank]).rfind(number + "waiting", 0) == 0;
}

TEST(CommRuntimeFailureTest, KilledPeerEndsWait) {
  for (const bool async : {false, true}) {
    const auto ranks = on_ranks(
        3, {},
        [&](CommRank& self) {
          float* x = self.floats(100);
          for (int i = 0;; ++i) {
            const zr_coll coll = collective(ZR_ALL_REDUCE, view(x, 100), view(x, 100), "bucket 7");
            if (self.rank.rank == 1 && i == 100) std::this_thread::sleep_for(std::chrono::seconds(60));
            if (!async) {
              self.comm.run(coll);
              continue;
            }
            zr::host::CallError error;
            zr_done* done = zr::host::comm::done_new(self.rig.host().abi());
            zr_code code = self.comm.ref().api->submit(self.comm.ref().comm, &coll, nullptr, done, &error);
            if (code == ZR_OK) code = self.comm.wait(done, -1, &error);
            zr::host::comm::done_release(done);
            if (code != ZR_OK) std::rethrow_exception(self.comm.take_failure());
          }
        },
        [](const SharedJob& job, const std::vector<pid_t>& pids) {
          for (int i = 0; i < 4000 && !(waits_in(job, 0, "101 ") && waits_in(job, 2, "101 ")); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          ::kill(pids[1], SIGKILL);
          job.break_job("rank 1 was killed by signal 9");  // as the control plane does when it detects the death
        });
    EXPECT_EQ(ranks[1].signal, SIGKILL);
    for (const int r : {0, 2}) {
      EXPECT_FALSE(ranks[static_cast<std::size_t>(r)].late);
      EXPECT_THAT(ranks[static_cast<std::size_t>(r)].threw,
                  AllOf(HasSubstr("rank 1 was killed by signal 9"),
                        HasSubstr("rank " + std::to_string(r) + ": 101 waiting in all_reduce 'bucket 7' (fp32, 100)")));
    }
  }
}

TEST(CommRuntimeFailureTest, AbortEndsBlockingPlugin) {
  expect_success(on_ranks(2, {.id = "poor", .timeout = std::chrono::milliseconds(200)}, [](CommRank& self) {
    if (self.rank.rank == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    expect_failure([&] { self.comm.barrier("end of epoch"); }, exit_code::peer_lost,
                   HasSubstr("waited longer than communicator.timeout (0.2s) in barrier 'end of epoch'"));
  }));
}

TEST(CommRuntimeFailureTest, RejectsInvalidArguments) {
  expect_success(on_ranks(2, {}, [](CommRank& self) {
    float* x = self.floats(100);
    const auto fails = [&](zr_coll coll, const std::string& says) {
      expect_failure([&] { self.comm.run(coll); }, exit_code::user, testing::Eq(says));
    };
    fails(collective(ZR_ALL_REDUCE, view(x, 10), view(x, 9), "w"), "all_reduce 'w': dst has 9 elements, src has 10");
    fails(collective(ZR_REDUCE_SCATTER, view(x, 10), view(x, 4), "w"),
          "reduce_scatter 'w': src has 10 elements, the full tensor has 8");
    fails(collective(ZR_ALL_GATHER, view(x, 4), view(x, 9), "w"),
          "all_gather 'w': dst has 9 elements, the full tensor has 8");
    fails(collective(ZR_ALL_REDUCE, view(nullptr, 10), view(x, 10), "w"),
          "all_reduce 'w': src has 10 elements but a null address");
    fails(collective(ZR_ALL_REDUCE, view(x, 10, ZR_I32), view(x, 10), "w"),
          "all_reduce 'w': src is int32 and dst is fp32");
    fails(collective(ZR_ALL_TO_ALL, view(x, 9), view(x + 50, 9), "w"),
          "all_to_all 'w': src has 9 elements, which cannot be divided equally among 2 ranks");
    fails(collective(99, view(x, 9), view(x, 9), "w"), "unknown operation 'w': operation code 99 is not defined");
    zr_coll coll = collective(ZR_BROADCAST, view(x, 9), view(x, 9), "w");
    coll.root = 2;
    fails(coll, "broadcast 'w': root 2 is out of range (world size 2)");
    coll = collective(ZR_SEND, view(x, 9), {}, "w");
    coll.peer = self.rank.rank;
    const std::string own = std::to_string(self.rank.rank);
    fails(coll, "send 'w': peer " + own + " must be another rank (this is rank " + own + ", world size 2)");
    const int64_t counts[] = {4, -1};
    coll = collective(ZR_ALL_GATHER, view(x, 4), view(x, 3), "w");
    coll.counts = counts;
    fails(coll, "all_gather 'w': rank 1's count is -1");
    coll = collective(ZR_ALL_REDUCE, view(x, 9), view(x, 9), "w");
    coll.reduce = 7;
    fails(coll, "all_reduce 'w': reduction code 7 is not defined");
    coll = collective(ZR_ALL_REDUCE, {x, 9, ZR_F32, 0, {2, 0}}, view(x, 9), "w");
    fails(coll, "all_reduce 'w': src is not in CPU memory");
    const std::string unknown =
        " that this zeroth does not know (0x2); install a newer zeroth, or a plug-in for this one";
    coll = collective(ZR_ALL_REDUCE, view(x, 9), view(x, 9), "w");
    coll.flags = ZR_COLL_ACCUMULATE | 2;
    fails(coll, "all_reduce 'w': flags has bits" + unknown);
    coll = collective(ZR_BARRIER, {}, {}, "w");
    coll.flags = 2;
    fails(coll, "barrier 'w': flags has bits" + unknown);
    coll = collective(ZR_ALL_REDUCE, view(x, 9), view(x, 9), "w");
    coll.rsv = 2;
    fails(coll, "all_reduce 'w': rsv has bits" + unknown);
    coll = collective(ZR_ALL_REDUCE, {x, 9, ZR_F32, 2, {1, 0}}, view(x, 9), "w");
    fails(coll, "all_reduce 'w': src.flags has bits" + unknown);
    coll = collective(ZR_ALL_REDUCE, view(x, 9), {x, 9, ZR_F32, 2, {1, 0}}, "w");
    fails(coll, "all_reduce 'w': dst.flags has bits" + unknown);
    self.comm.barrier("the communicator still works");
  }));
}

// What the host's table rejects before it reads the collective.
TEST(CommRuntimeFailureTest, RejectsPluginsThatBreakTheAbi) {
  expect_success(on_ranks(2, {}, [](CommRank& self) {
    float* x = self.floats(10);
    const auto ref = self.comm.ref();
    zr::host::CallError error;
    zr_coll coll = collective(ZR_ALL_REDUCE, view(x, 9), view(x, 9), "w");
    int stream = 0;
    EXPECT_EQ(ref.api->submit(ref.comm, &coll, reinterpret_cast<zr_stream*>(&stream), nullptr, &error), ZR_UNSUPPORTED);
    EXPECT_STREQ(error.msg,
                 "a collective was submitted with a stream, but the engine has none: this is a bug in the plug-in");
    EXPECT_NE(self.comm.take_failure(), nullptr);
    coll.size = 120;
    EXPECT_EQ(ref.api->submit(ref.comm, &coll, nullptr, nullptr, &error), ZR_INVALID);
    EXPECT_STREQ(error.msg, "a zr_coll has 120 bytes, fewer than in ABI 0.9: this is a bug in the plug-in");
    EXPECT_NE(self.comm.take_failure(), nullptr);
    self.comm.barrier("the communicator still works");
  }));
}

// A plug-in that is built with newer headers passes a longer collective.
TEST(CommRuntimeFailureTest, IgnoresMembersOfACollectiveThatItDoesNotKnow) {
  expect_success(on_ranks(2, {}, [](CommRank& self) {
    float* x = self.floats(10);
    std::fill_n(x, 9, 1.0f);
    const auto ref = self.comm.ref();
    struct {
      zr_coll known;
      uint64_t unknown;
    } coll{collective(ZR_ALL_REDUCE, view(x, 9), view(x, 9), "w"), 7};
    coll.known.size = sizeof coll;
    zr::host::CallError error;
    ASSERT_EQ(ref.api->submit(ref.comm, &coll.known, nullptr, nullptr, &error), ZR_OK) << error.msg;
    EXPECT_EQ(x[8], 2);
  }));
}

// Only rank 0 allocates it; the others would wait for it.
TEST(CommRuntimeFailureTest, SharedMemoryThatRankZeroCannotAllocateIsAnErrorOnAllRanks) {
  expect_success(on_ranks(3, {}, [](CommRank& self) {
    const auto allocate = [&](int64_t bytes) {
      return self.comm.allocate_shared(bytes, bytes / 3, zr::host::Tier::device, zr::host::MemoryKind::other, "shared");
    };
    expect_failure(
        [&] { allocate(int64_t{1} << 50); }, exit_code::environment,
        HasSubstr(self.rank.rank == 0 ? "cannot allocate 1125899906842624 bytes of shared memory"
                                      : "rank 0 cannot allocate the memory that the ranks of its host share"));
    const auto [writer, reader] = allocate(4096);
    static_cast<char*>(writer)[self.rank.rank] = static_cast<char>(7 + self.rank.rank);
    self.comm.barrier("written");
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(static_cast<const char*>(reader)[rank], 7 + rank);
    self.comm.barrier("read");
    self.comm.free(writer);
  }));
}

}  // namespace
