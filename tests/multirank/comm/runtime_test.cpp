// CommRuntime: byte counters, composed operations and allocations, over comm_shm and over the plug-in `poor`, which
// supports hardly any operation.
#include <numeric>
#include <thread>

#include "multirank/comm/cases.hpp"
#include "support/comm_rank.hpp"

namespace {

using namespace zr::testing;
using testing::AllOf;
using testing::HasSubstr;
using zr::host::comm::CommRuntime;
namespace exit_code = zr::exit_code;
using zr::host::MemoryKind;
using zr::host::Tier;

// ---- composition ----

struct PoorConfig {
  int world;
  const char* keys;
  friend void PrintTo(const PoorConfig& p, std::ostream* out) { *out << p.world << " ranks " << p.keys; }
};
class ComposedCollectivesTest : public testing::TestWithParam<PoorConfig> {};

TEST_P(ComposedCollectivesTest, EveryOperationMatchesReference) {
  expect_success(on_ranks(GetParam().world, {.id = "poor", .keys = GetParam().keys}, [](CommRank& self) {
    const Bench bench{
        self.comm.rank(), self.comm.world(), [&](const zr_coll& coll) { self.comm.run(coll); },
        [&](int64_t bytes) { return self.comm.allocate(bytes, 64, Tier::host, MemoryKind::other, "test"); },
        [&](void* memory) { self.comm.free(memory); }};
    Memory memory(bench, 64 << 10);
    uint64_t seed = 1;
    for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F64, ZR_I8, ZR_I64})
      for (const Case& c : cases(bench.world, dtype, 7)) check(bench, memory, c, Home::shared, seed += 1000);
    for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE_SCATTER, ZR_REDUCE})
      for (const uint32_t flags : {0u, uint32_t{ZR_COLL_ACCUMULATE}})
        for (const uint32_t reduce : {ZR_SUM, ZR_MIN, ZR_MAX})
          for (const zr_dtype src : {ZR_F32, ZR_BF16, ZR_F16})
            check(bench, memory,
                  {.op = op,
                   .reduce = reduce,
                   .flags = flags,
                   .src = src,
                   .dst = ZR_F32,
                   .world = bench.world,
                   .total = 999,
                   .part = 333},
                  Home::own, seed += 1000);
  }));
}

TEST_P(ComposedCollectivesTest, LargeOperationsAreSplitToFitStagingBuffer) {
  expect_success(on_ranks(GetParam().world, {.id = "poor", .keys = GetParam().keys}, [](CommRank& self) {
    const Bench bench{
        self.comm.rank(), self.comm.world(), [&](const zr_coll& coll) { self.comm.run(coll); },
        [&](int64_t bytes) { return self.comm.allocate(bytes, 64, Tier::host, MemoryKind::other, "test"); },
        [&](void* memory) { self.comm.free(memory); }};
    const int64_t part = (int64_t{5} << 20) / 4 / bench.world;  // 5 MiB in total; the staging buffer has 4 MiB
    Memory memory(bench, 6 << 20);
    for (const uint32_t op : {ZR_ALL_REDUCE, ZR_REDUCE_SCATTER, ZR_GATHER, ZR_SCATTER, ZR_ALL_TO_ALL})
      check(bench, memory,
            {.op = op,
             .world = bench.world,
             .root = 1,
             .total = part * bench.world,
             .part = op == ZR_ALL_TO_ALL ? part / bench.world : part},
            Home::shared, op);
    for (const auto& row : self.rig.ledger().rows()) {
      if (row.kind == MemoryKind::communicator) {
        EXPECT_LT(row.peak, 5 << 20) << "staging memory must be bounded";
      }
    }
  }));
}
INSTANTIATE_TEST_SUITE_P(Ranks, ComposedCollectivesTest,
                         testing::Values(PoorConfig{2, ""}, PoorConfig{3, ""}, PoorConfig{2, "exchanges = true\n"},
                                         PoorConfig{3, "exchanges = true\n"}));

TEST(CommRuntimeTest, CountsBytesActuallySentByComposedOperations) {
  expect_success(on_ranks(3, {.id = "poor"}, [](CommRank& self) {
    float* x = self.floats(3000);
    self.comm.run(collective(ZR_REDUCE_SCATTER, view(x, 3000), view(x + 1000 * self.rank.rank, 1000),
                             "full tensor to every rank"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_REDUCE_SCATTER], 2 * 3000 * 4);
    EXPECT_EQ(self.comm.volume().calls[ZR_REDUCE_SCATTER], 1);
  }));
  expect_success(on_ranks(3, {.id = "poor", .keys = "exchanges = true\n"}, [](CommRank& self) {
    float* x = self.floats(3000);
    self.comm.run(
        collective(ZR_REDUCE_SCATTER, view(x, 3000), view(x + 1000 * self.rank.rank, 1000), "one part to each rank"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_REDUCE_SCATTER], 2 * 1000 * 4);
    self.comm.run(collective(ZR_ALL_REDUCE, view(x, 3000), view(x, 3000), "parts, which are gathered"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_ALL_REDUCE], (2 * 1000 + 2000) * 4);
    zr_coll added = collective(ZR_ALL_REDUCE, view(x, 3000), view(x, 3000), "to results that differ");
    added.flags = ZR_COLL_ACCUMULATE;
    self.comm.run(added);
    EXPECT_EQ(self.comm.volume().bytes[ZR_ALL_REDUCE], (2 * 1000 + 2000 + 2 * 3000) * 4);
  }));
}

TEST(CommRuntimeTest, RejectsSendThatCannotBeComposed) {
  expect_success(on_ranks(2, {.id = "poor"}, [](CommRank& self) {
    float* x = self.floats(10);
    zr_coll send = collective(self.rank.rank == 0 ? ZR_SEND : ZR_RECV, view(x, 10), view(x, 10), "activations");
    send.peer = 1 - self.rank.rank;
    expect_failure([&] { self.comm.run(send); }, exit_code::environment,
                   AllOf(HasSubstr("communicator 'poor' ("), HasSubstr("'activations' (fp32, 10): "),
                         HasSubstr(" is not supported by the communicator and cannot be composed of collectives")));
  }));
}

TEST(CommRuntimeTest, OpenFailsWithoutAllGatherOfBytes) {
  SharedJob job;
  expect_success(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world),
                {.id = "poor", .keys = "gathers = false\n"});
    expect_failure([&] { rig.open(); }, exit_code::environment,
                   HasSubstr("it does not support all_gather of bytes, from which the engine composes missing "
                             "operations; choose another communicator"));
  }));
}

TEST(CommRuntimeTest, OpenFailsWithoutHostMemory) {
  SharedJob job;
  expect_success(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world), {.id = "poor", .keys = "cpu = false\n"});
    expect_failure([&] { rig.open(); }, exit_code::environment,
                   HasSubstr("caps: device_types is 0x4, without CPU memory (0x2), where the engine has its buffers; "
                             "choose another communicator"));
  }));
}

// `poor` has one key in the store, after the prefix of the communicator.
TEST(CommRuntimeTest, EachCommunicatorHasItsOwnStorePrefix) {
  SharedJob job;
  expect_success(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world), {.id = "poor"});
    const auto first = rig.open(), second = rig.open();
    for (int i = 0; i < 3; ++i) {
      first->barrier("first");
      second->barrier("second");
    }
  }));
}

// ---- counters and reports ----

TEST(CommRuntimeTest, CountsBytesPerOperationWithoutPadding) {
  expect_success(on_ranks(3, {}, [](CommRank& self) {
    const int r = self.rank.rank;
    float* x = self.floats(3000);
    float* y = self.floats(3000);
    // 70 of every 100 elements of y are not padding.
    zr::host::comm::NonPaddingRanges non_padding{reinterpret_cast<const char*>(y), ZR_F32, 3000, {}};
    for (int64_t i = 0; i < 3000; i += 100) non_padding.ranges.emplace_back(i, i + 70);
    self.comm.set_planned_buffer(non_padding);
    self.comm.run(collective(ZR_REDUCE_SCATTER, view(x, 3000), view(x + 1000 * r, 1000), "x"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_REDUCE_SCATTER], 2 * 1000 * 4);
    self.comm.run(collective(ZR_REDUCE_SCATTER, view(x, 3000), view(y + 1000 * r, 1000), "into y"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_REDUCE_SCATTER], 2 * 1000 * 4 + 2 * 700 * 4)
        << "only the elements of the destination that are not padding must count";
    self.comm.run(collective(ZR_ALL_GATHER, view(y + 1000 * r, 1000), view(y, 3000), "y"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_ALL_GATHER], 2 * 700 * 4);
    const int64_t counts[] = {50, 120, 2830};
    const int64_t starts[] = {0, 50, 170};
    self.comm.run([&] {
      zr_coll coll = collective(ZR_ALL_GATHER, view(y + starts[r], counts[r]), view(y, 3000), "uneven");
      coll.counts = counts;
      return coll;
    }());
    const int64_t live_elements[] = {50, 20 + 70, 2100 - 140};
    EXPECT_EQ(self.comm.volume().bytes[ZR_ALL_GATHER], 2 * 700 * 4 + (2100 - live_elements[r]) * 4);
    self.comm.run(collective(ZR_ALL_REDUCE, view(x, 3000), view(x, 3000), "x"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_ALL_REDUCE], 2 * 1000 * 4 + 2000 * 4);
    zr_coll broadcast = collective(ZR_BROADCAST, view(x, 3000), view(x, 3000), "x");
    broadcast.root = 1;
    self.comm.run(broadcast);
    EXPECT_EQ(self.comm.volume().bytes[ZR_BROADCAST], r == 1 ? 0 : 3000 * 4);
    self.comm.run_control(broadcast);
    EXPECT_EQ(self.comm.volume().bytes[ZR_BROADCAST], r == 1 ? 0 : 3000 * 4);
    EXPECT_EQ(self.comm.volume().control_bytes, r == 1 ? 0 : 3000 * 4);
    EXPECT_EQ(self.comm.volume().calls[ZR_BROADCAST], 1);
    const auto volume = self.comm.volume();
    EXPECT_EQ(volume.total(), std::accumulate(volume.bytes.begin(), volume.bytes.end(), int64_t{0}));
    self.comm.free(y);
    float* z = self.floats(3000);  // may reuse the address of y
    const int64_t before = self.comm.volume().bytes[ZR_ALL_GATHER];
    self.comm.run(collective(ZR_ALL_GATHER, view(z + 1000 * r, 1000), view(z, 3000), "z"));
    EXPECT_EQ(self.comm.volume().bytes[ZR_ALL_GATHER] - before, 2 * 1000 * 4);
  }));
}

TEST(CommRuntimeTest, AllGatherAndBroadcastOfBytesPreserveContent) {
  expect_success(on_ranks(3, {}, [](CommRank& self) {
    for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{777}, std::size_t{200001}}) {
      const auto text = [&](int r) {
        std::string bytes(length, '\0');
        for (std::size_t i = 0; i < length; ++i) bytes[i] = static_cast<char>(i * 7 + static_cast<std::size_t>(r));
        return bytes;
      };
      const auto all = self.comm.all_gather_bytes(text(self.rank.rank), "words");
      ASSERT_EQ(all.size(), 3u);
      for (int r = 0; r < 3; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], text(r)) << length;
      EXPECT_EQ(self.comm.broadcast_bytes(self.rank.rank == 2 ? text(5) : "not mine", 2, "words of rank 2"), text(5));
    }
    EXPECT_GT(self.comm.volume().control_bytes, 0);
    EXPECT_EQ(self.comm.volume().total(), 0);
  }));
}

TEST(CommRuntimeTest, RecordsAllocationsInLedger) {
  expect_success(on_ranks(2, {}, [](CommRank& self) {
    const auto now = [&](MemoryKind kind) {
      for (const auto& row : self.rig.ledger().rows())
        if (row.kind == kind && row.tier == Tier::device) return row.now;
      return int64_t{0};
    };
    void* memory = self.comm.allocate(1000, 64, Tier::device, MemoryKind::weights, "full weights");
    EXPECT_EQ(now(MemoryKind::weights), 1000);
    for (int i = 0; i < 1000; ++i) ASSERT_EQ(static_cast<char*>(memory)[i], 0);
    self.comm.free(memory);
    EXPECT_EQ(now(MemoryKind::weights), 0);
    self.comm.free(nullptr);
  }));
}

TEST(CommRuntimeTest, SingleRankAllocationsHaveRequestedAlignment) {
  expect_success(on_ranks(1, {}, [](CommRank& self) {  // with one rank the host allocates, not a plug-in
    for (const int64_t align : {int64_t{64}, int64_t{64} << 10, int64_t{8} << 20})
      for (const int64_t bytes : {int64_t{1000}, int64_t{5} << 20}) {
        void* memory = self.comm.allocate(bytes, align, Tier::host, MemoryKind::staging, "pages");
        EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(align), 0u) << align << " " << bytes;
        EXPECT_EQ(static_cast<char*>(memory)[bytes - 1], 0);
        self.comm.free(memory);
      }
  }));
}

TEST(CommRuntimeTest, SequenceNumbersContinueAcrossCommunicators) {
  SharedJob job;
  expect_success(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
    for (int engine = 0; engine < 2; ++engine) {
      const auto comm = rig.open();
      comm->barrier("one");
      comm->barrier("two");
      EXPECT_EQ(std::string(job.page().doing[rank.rank]), engine == 0 ? "2 " : "4 ") << "no rank may be waiting";
    }
  }));
}

// ---- operations that a plug-in submits through the host's table ----

TEST(CommRuntimeTest, SubmittedOperationsCompleteThroughAsyncService) {
  expect_success(on_ranks(2, {}, [](CommRank& self) {
    const auto ref = self.comm.ref();
    EXPECT_EQ(ref.world, 2);
    const auto* async =
        static_cast<const zr_async_service*>(self.rig.host().abi()->service(self.rig.host().abi(), "zr.host.async/1"));
    ASSERT_NE(async, nullptr);
    constexpr int64_t kCount = 4096;
    float* x = self.floats(8 * kCount);
    std::fill_n(x, 8 * kCount, static_cast<float>(self.rank.rank + 1));
    self.comm.barrier("start");
    if (self.rank.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    std::vector<zr_done*> dones;
    zr::host::CallError error;
    for (int i = 0; i < 8; ++i) {
      dones.push_back(async->done_new(self.rig.host().abi()));
      const std::string label = "bucket " + std::to_string(i);
      const zr_coll coll =
          collective(ZR_ALL_REDUCE, view(x + i * kCount, kCount), view(x + i * kCount, kCount), label.c_str());
      ASSERT_EQ(ref.api->submit(ref.comm, &coll, nullptr, dones.back(), &error), ZR_OK) << error.msg;
    }
    EXPECT_EQ(self.comm.submitted(), 8);
    if (self.rank.rank == 0) {
      EXPECT_EQ(async->done_wait(dones[3], 1000000, &error), ZR_TIMEOUT) << "a wait of 1 ms must time out";
    }
    for (zr_done* done : dones) {
      EXPECT_EQ(async->done_wait(done, -1, &error), ZR_OK) << error.msg;
      async->done_release(done);
    }
    for (int64_t i = 0; i < 8 * kCount; i += 100) ASSERT_EQ(x[i], 3);
    EXPECT_EQ(ref.api->progress(ref.comm, &error), ZR_OK);
    EXPECT_EQ(self.comm.take_failure(), nullptr);
  }));
}

TEST(CommRuntimeTest, ComposedOperationWithACompletionIsCompleteWhenSubmitReturns) {
  expect_success(on_ranks(2, {.id = "poor"}, [](CommRank& self) {
    const auto ref = self.comm.ref();
    zr::host::CallError error;
    float* x = self.floats(100);
    zr_done* done = zr::host::comm::done_new(self.rig.host().abi());
    const zr_coll coll = collective(ZR_ALL_REDUCE, view(x, 100), view(x, 100), "composed");
    ASSERT_EQ(ref.api->submit(ref.comm, &coll, nullptr, done, &error), ZR_OK) << error.msg;
    EXPECT_EQ(zr::host::comm::done_poll(done, nullptr), ZR_OK);
    zr::host::comm::done_release(done);
  }));
}

TEST(DoneTest, KeepsFirstResolution) {
  zr_done* done = zr::host::comm::done_new(nullptr);
  EXPECT_EQ(zr::host::comm::done_poll(done, nullptr), ZR_AGAIN);
  zr::host::comm::done_resolve(done, ZR_IO, 5, "disk full");
  zr::host::comm::done_resolve(done, ZR_OK, 0, nullptr);
  zr::host::CallError error;
  EXPECT_EQ(zr::host::comm::done_poll(done, &error), ZR_IO);
  EXPECT_EQ(error.native, 5);
  EXPECT_STREQ(error.msg, "disk full");
  zr::host::comm::done_release(done);
  zr::host::comm::done_release(nullptr);
}

// ---- world size 1 ----

TEST(CommRuntimeTest, SingleRankNeedsNoPluginAndMatchesReference) {
  SharedJob job;
  zr::host::Ledger ledger;
  zr::host::ThreadPool pool(2);
  zr::host::plugin::PluginHost host(ledger, pool);
  CommRuntime comm(host, std::make_shared<SharedControl>(job, 0, 1), nullptr, {});
  const Bench bench{0, 1, [&](const zr_coll& coll) { comm.run(coll); },
                    [&](int64_t bytes) { return comm.allocate(bytes, 64, Tier::host, MemoryKind::other, "test"); },
                    [&](void* memory) { comm.free(memory); }};
  Memory memory(bench, 1 << 20);
  uint64_t seed = 1;
  for (const zr_dtype dtype : kDtypes)
    for (const Case& c : cases(1, dtype, 7)) check(bench, memory, c, Home::own, seed += 1000);
  for (const uint32_t flags : {0u, uint32_t{ZR_COLL_ACCUMULATE}})
    check(bench, memory,
          {.op = ZR_REDUCE_SCATTER, .flags = flags, .src = ZR_BF16, .dst = ZR_F32, .world = 1, .part = 200001},
          Home::own, 3);
  float zeros[2] = {-0.0f, 1};
  comm.run(collective(ZR_ALL_REDUCE, view(zeros, 2), view(zeros, 2), "from +0"));
  EXPECT_FALSE(std::signbit(zeros[0])) << "the sum of +0 and -0 must be +0";
  EXPECT_EQ(comm.volume().total(), 0);
  EXPECT_EQ(comm.all_gather_bytes("words", "w"), std::vector<std::string>{"words"});
  EXPECT_EQ(comm.broadcast_bytes("words", 0, "w"), "words");
}

}  // namespace
