// The communicator "nccl" on the simulated device of tests/simulators/sim_device, with the library of
// tests/simulators/sim_nccl in place of NCCL: compared with scalar references, and its errors.
#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>

#include <thread>

#include "multirank/comm/device_rank.hpp"
#include "support/name_by_ranks.hpp"
#include "zr/collective.hpp"

namespace {

using namespace zr::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using zr::host::comm::done_new;
using zr::host::comm::done_poll;
using zr::host::comm::done_release;

const std::string kLibrary = ZR_BUILD_DIR "/tests/devices/nccl/libnccl.so.2";

RigOptions nccl_options(const std::string& keys = "", const std::string& library = kLibrary) {
  RigOptions options;
  options.id = "nccl";
  const std::string staging = keys.find("staging_bytes") == keys.npos ? "staging_bytes = \"1MiB\"\n" : "";
  options.keys = "library = \"" + library + "\"\n" + staging + keys;
  options.device = "sim";
  return options;
}

// Each rank has a device of its own.
class CommNcclTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { ::setenv("ZR_SIM_DEVICES", "4", 1); }
  void TearDown() override { ::unsetenv("ZR_SIM_DEVICES"); }
  void on_ranks(int world, const std::string& keys, const std::function<void(DeviceRank&)>& body) {
    expect_success(run_sim_ranks(world, [&](const SharedJob& job, Rank& rank) {
      DeviceRank device(job, rank, rank.rank, nccl_options(keys));
      body(device);
    }));
  }
};

TEST_P(CommNcclTest, EveryOperationMatchesReferenceForEveryType) {
  on_ranks(GetParam(), "", [](DeviceRank& rank) {
    check_every_operation(rank.bench(), {ZR_F32, ZR_BF16, ZR_F16, ZR_F64, ZR_I8, ZR_U8, ZR_I32, ZR_I64}, 7,
                          {Home::shared, Home::own});
  });
}

TEST_P(CommNcclTest, ReductionsSupportMinMaxAndAccumulate) {
  on_ranks(GetParam(), "", [](DeviceRank& rank) {
    const Bench bench = rank.bench();
    Memory memory(bench, 64 << 10);
    check_reductions(bench, memory, {Home::shared});
  });
}

TEST_P(CommNcclTest, UpcastsSourcesWithoutIntermediateRounding) {
  on_ranks(GetParam(), "staging_bytes = \"4KiB\"\n", [](DeviceRank& rank) {
    const Bench bench = rank.bench();
    Memory memory(bench, 64 << 10);
    check_upcasts(bench, memory, {Home::shared, Home::own});
  });
}

// 6767 elements; a piece has at most 1024.
TEST_P(CommNcclTest, ManyPiecesMatchReference) {
  on_ranks(GetParam(), "staging_bytes = \"4KiB\"\n", [](DeviceRank& rank) {
    check_every_operation(rank.bench(), {ZR_F32, ZR_BF16}, 101, {Home::shared});
  });
}

// Collectives of host memory, through the device that the rank would have for its own memory.
Bench host_bench(RawComm& comm) {
  return {comm.rank(), comm.world(), [&comm](const zr_coll& coll) { comm.run(coll); },
          [](int64_t bytes) { return std::calloc(1, static_cast<std::size_t>(bytes)); },
          [](void* memory) { std::free(memory); }};
}

TEST_P(CommNcclTest, HostMemoryMatchesReferenceForEveryType) {
  on_ranks(GetParam(), "staging_bytes = \"64KiB\"\n", [](DeviceRank& rank) {
    RawComm comm(rank.rig());
    check_every_operation(host_bench(comm), {ZR_F32, ZR_BF16, ZR_F64, ZR_U8, ZR_I32}, 7, {Home::own});
  });
}

TEST_P(CommNcclTest, HostMemoryInManyPiecesMatchesReference) {
  on_ranks(GetParam(), "staging_bytes = \"4KiB\"\n", [](DeviceRank& rank) {
    RawComm comm(rank.rig());
    const Bench bench = host_bench(comm);
    check_every_operation(bench, {ZR_F32}, 101, {Home::own});
    Memory memory(bench, 64 << 10);
    check_reductions(bench, memory, {Home::own});
    check_upcasts(bench, memory, {Home::own});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommNcclTest, ::testing::Values(2, 4), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, CommNcclTest, ::testing::Values(3), zr::test::NameByRanks());

class CommNcclLifeTest : public CommNcclTest {
 protected:
  // The message of the failure with which opening fails; "" if it does not.
  static std::string open_failure(const SharedJob& job, Rank& rank, int32_t device, const RigOptions& options) {
    try {
      DeviceRank opened(job, rank, device, options);
    } catch (const std::exception& failure) {
      return failure.what();
    }
    return "";
  }
};

// Each collective reads what the one before it wrote, and collectives of host memory are between them.
TEST_F(CommNcclLifeTest, CollectivesOnTheSameMemoryRunInOrder) {
  on_ranks(3, "staging_bytes = \"16KiB\"\n", [](DeviceRank& rank) {
    constexpr int64_t kCount = 5000;
    RawComm host(rank.rig());
    void* const memory = rank.allocate(4 * kCount);
    std::vector<float> x(kCount, static_cast<float>(rank.rank() + 1));
    rank.stream().upload(x.data(), memory, 4 * kCount);
    const zr_view all = view_on(rank, memory, kCount);
    float counter = 1;
    const zr_view number{&counter, 1, ZR_F32, 0, zr::host::kHostMemory};
    float expected = 6, expected_counter = 1;
    for (int i = 0; i < 10; ++i) {
      ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "sum")), ZR_OK) << rank.comm().said();
      ASSERT_EQ(rank.submit(zr::broadcast(all, i % 3, "share")), ZR_OK) << rank.comm().said();
      if (i > 0) expected *= 3;
      if (i % 3 != 0) continue;
      ASSERT_EQ(host.submit(zr::all_reduce(number, number, "count")), ZR_OK) << host.said();
      EXPECT_EQ(counter, expected_counter *= 3);
    }
    ASSERT_EQ(rank.submit(zr::barrier("end")), ZR_OK) << rank.comm().said();
    ASSERT_EQ(host.submit(zr::barrier("end")), ZR_OK) << host.said();
    rank.stream().download(memory, x.data(), 4 * kCount);
    EXPECT_EQ(x.front(), expected);
    EXPECT_EQ(x.back(), expected);
  });
}

// NCCL may deadlock if operations of two communicators run in different orders on two ranks.
TEST_F(CommNcclLifeTest, OperationsOnHostMemoryRunAfterEarlierOnesOnTheDevice) {
  on_ranks(2, "", [](DeviceRank& rank) {
    RawComm host(rank.rig());
    device_function<void(uint64_t, unsigned)>("zr_sim_set_delay")(static_cast<uint64_t>(rank.rank()), 3000);
    void* const memory = rank.allocate(4);
    float x = 1;
    rank.stream().upload(&x, memory, 4);
    const zr_view all = view_on(rank, memory, 1);
    for (int i = 0; i < 10; ++i) ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "sum")), ZR_OK) << rank.comm().said();
    EXPECT_LT(SimStream::peek<float>(memory), 1024) << "the call does not wait for the device";
    ASSERT_EQ(host.submit(zr::barrier("after")), ZR_OK) << host.said();
    EXPECT_EQ(SimStream::peek<float>(memory), 1024);
  });
}

// Two engines of a process, each with an instance of the plug-in and a stream of its own.
TEST_F(CommNcclLifeTest, OperationsOfEnginesOnOneDeviceRunInTheOrderOfTheirCalls) {
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    DeviceRank first(job, rank, rank.rank, nccl_options()), second(job, rank, rank.rank, nccl_options(), 5);
    const zr_view one = view_on(first, first.allocate(80), 20), other = view_on(second, second.allocate(80), 20);
    std::atomic<bool> is_open{false};
    first.stream().wait_for(is_open);
    zr_done* const done = done_new(second.comm().host().abi());
    EXPECT_EQ(first.submit(zr::all_reduce(one, one, "x")), ZR_OK) << first.comm().said();
    EXPECT_EQ(second.submit(zr::all_reduce(other, other, "y"), done), ZR_OK) << second.comm().said();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(done_poll(done, nullptr), ZR_AGAIN) << "it runs after the first engine's";
    is_open = true;
    second.stream().synchronize();
    EXPECT_EQ(done_poll(done, nullptr), ZR_OK);
    done_release(done);
  }));
}

TEST_F(CommNcclLifeTest, CompletionsAreResolved) {
  on_ranks(2, "", [](DeviceRank& rank) {
    RawComm host(rank.rig());
    const zr_view all = view_on(rank, rank.allocate(4000), 1000);
    zr_done* const done = done_new(rank.comm().host().abi());
    ASSERT_EQ(rank.submit(zr::all_reduce(all, all, "sum"), done), ZR_OK) << rank.comm().said();
    rank.stream().synchronize();
    EXPECT_EQ(done_poll(done, nullptr), ZR_OK);
    done_release(done);
    float x = 1;
    const zr_view number{&x, 1, ZR_F32, 0, zr::host::kHostMemory};
    zr_done* const host_done = done_new(rank.comm().host().abi());
    ASSERT_EQ(host.submit(zr::all_reduce(number, number, "sum"), host_done), ZR_OK) << host.said();
    EXPECT_EQ(done_poll(host_done, nullptr), ZR_OK);
    EXPECT_EQ(x, 2);
    done_release(host_done);
  });
}

TEST_F(CommNcclLifeTest, TheLeastStagingMemoryOfAllRanksCounts) {
  expect_success(run_sim_ranks(3, [&](const SharedJob& job, Rank& rank) {
    DeviceRank device(job, rank, rank.rank, nccl_options(rank.rank == 1 ? "staging_bytes = \"4KiB\"\n" : ""));
    check_every_operation(device.bench(), {ZR_F32}, 101, {Home::shared});
  }));
}

TEST_F(CommNcclLifeTest, RejectsWhatItDoesNotOffer) {
  on_ranks(2, "", [](DeviceRank& rank) {
    RawComm host(rank.rig());
    const zr_view all = view_on(rank, rank.allocate(80), 20);
    EXPECT_EQ(rank.submit(zr::send(all, 1 - rank.rank(), 0, "m")), ZR_UNSUPPORTED);
    EXPECT_EQ(rank.comm().said(), "send 'm': communicator 'nccl' has no messages with tags; use a collective");
    EXPECT_EQ(rank.comm().submit(zr::all_reduce(all, all, "x")), ZR_INVALID);
    EXPECT_EQ(rank.comm().said(), "all_reduce 'x': memory of a device needs the stream of the call");
    EXPECT_EQ(host.submit(zr::barrier("x"), nullptr, rank.stream().abi()), ZR_INVALID);
    EXPECT_EQ(host.said(), "barrier 'x': host memory needs a call without a stream");
    EXPECT_EQ(rank.submit(zr::all_reduce(all, all, "x")), ZR_OK) << rank.comm().said();
  });
}

TEST_F(CommNcclLifeTest, TwoRanksOnOneDeviceAreRejected) {
  expect_success(run_sim_ranks(3, [&](const SharedJob& job, Rank& rank) {
    EXPECT_THAT(open_failure(job, rank, rank.rank == 0 ? 0 : 1, nccl_options()),
                AllOf(HasSubstr("ranks 1 and 2 both use GPU sim:1 of host '"),
                      HasSubstr("start one rank per GPU, or set communicator = \"shm\"")));
  }));
}

TEST_F(CommNcclLifeTest, MissingAndOldLibrariesAreReported) {
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    EXPECT_THAT(open_failure(job, rank, rank.rank, nccl_options("", "/nowhere/libnccl.so.2")),
                AllOf(HasSubstr("cannot load NCCL's library: /nowhere/libnccl.so.2"), HasSubstr("install NCCL 2.14")));
    ::setenv("ZR_SIM_NCCL_VERSION", "21307", 1);
    EXPECT_THAT(open_failure(job, rank, rank.rank, nccl_options()), HasSubstr("is NCCL 2.13.7, which is too old"));
  }));
}

// Rank 1 ends before it opens the communicator; the job's store reports it.
TEST_F(CommNcclLifeTest, OpeningFailsIfARankNeverComes) {
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    if (rank.rank == 1) return job.break_job("rank 1 has ended");
    EXPECT_THAT(open_failure(job, rank, 0, nccl_options()), HasSubstr("rank 1 has ended"));
  }));
}

TEST_F(CommNcclLifeTest, OpeningFailsIfNcclDoesNotConnectTheRanks) {
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    if (rank.rank == 1) ::setenv("ZR_SIM_NCCL_STUCK", "1", 1);
    EXPECT_THAT(open_failure(job, rank, rank.rank, nccl_options("connect_timeout = \"300ms\"\n")),
                HasSubstr("has not connected the ranks within communicator.nccl.connect_timeout"));
  }));
}

// Rank 1 does not connect, and ends 300 ms later; the job's store reports it.
TEST_F(CommNcclLifeTest, OpeningFailsIfTheJobFailsWhileNcclConnects) {
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    if (rank.rank == 1) ::setenv("ZR_SIM_NCCL_STUCK", "1", 1);
    std::jthread fails;
    if (rank.rank == 1)
      fails = std::jthread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        job.break_job("rank 1 has ended");
      });
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(open_failure(job, rank, rank.rank, nccl_options()), HasSubstr("rank 1 has ended"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << "connect_timeout is 2 minutes";
  }));
}

// Rank 1 takes part in nothing, but lives until rank 0 has ended its part.
bool is_idle_rank(DeviceRank& rank) {
  if (rank.rank() == 1) rank.rig().control()->get("rank 0 has ended", std::chrono::seconds(30));
  return rank.rank() == 1;
}
void end_idle_rank(DeviceRank& rank) { rank.rig().control()->put("rank 0 has ended", ""); }

TEST_F(CommNcclLifeTest, AbortEndsStreams) {
  on_ranks(2, "", [](DeviceRank& rank) {
    if (is_idle_rank(rank)) return;
    const zr_view all = view_on(rank, rank.allocate(80), 20);
    zr_done* const done = done_new(rank.comm().host().abi());
    EXPECT_EQ(rank.submit(zr::all_reduce(all, all, "x"), done), ZR_OK) << rank.comm().said();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(done_poll(done, nullptr), ZR_AGAIN) << "the stream waits for rank 1";
    rank.comm().api().abort(rank.comm().comm());
    rank.stream().synchronize();
    EXPECT_EQ(done_poll(done, nullptr), ZR_CANCELLED);
    done_release(done);
    EXPECT_EQ(rank.submit(zr::all_reduce(all, all, "x")), ZR_CANCELLED);
    EXPECT_EQ(rank.submit(zr::barrier("x")), ZR_CANCELLED) << "and so do all later calls";
    end_idle_rank(rank);
  });
}

TEST_F(CommNcclLifeTest, AbortEndsCallsOnHostMemory) {
  on_ranks(2, "", [](DeviceRank& rank) {
    RawComm host(rank.rig());
    if (is_idle_rank(rank)) return;
    std::vector<float> x(100);
    const zr_view all{x.data(), 100, ZR_F32, 0, zr::host::kHostMemory};
    std::thread aborts([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      host.api().abort(host.comm());
    });
    EXPECT_EQ(host.submit(zr::all_reduce(all, all, "x")), ZR_CANCELLED) << host.said();
    aborts.join();
    EXPECT_EQ(host.submit(zr::barrier("x")), ZR_CANCELLED);
    end_idle_rank(rank);
  });
}

// Rank 1's NCCL fails in the second collective.
TEST_F(CommNcclLifeTest, ErrorsOfNcclAreReported) {
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    if (rank.rank == 1) ::setenv("ZR_SIM_NCCL_ERROR", "3", 1);
    DeviceRank device(job, rank, rank.rank, nccl_options());
    const zr_view all = view_on(device, device.allocate(4000), 1000);
    EXPECT_EQ(device.submit(zr::all_reduce(all, all, "first")), ZR_OK) << device.comm().said();
    const zr_code code = device.submit(zr::all_reduce(all, all, "second"));
    if (rank.rank == 1) {
      EXPECT_EQ(code, ZR_COMM);
      EXPECT_THAT(device.comm().said(), HasSubstr("all_reduce 'second': NCCL: remote process exited or there was a "
                                                  "network error: planted by ZR_SIM_NCCL_ERROR"));
      EXPECT_EQ(device.submit(zr::barrier("third")), ZR_COMM);
    }
    device.comm().api().abort(device.comm().comm());  // as the host does when the job fails
    device.stream().synchronize();
  }));
}

// sim_nccl ends a process that closes a communicator without memory that was registered, or with memory that still is.
TEST_F(CommNcclLifeTest, RegistersItsStagingMemoryWithNccl) {
  ::setenv("ZR_SIM_NCCL_REGISTERED", "1", 1);
  expect_success(run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    DeviceRank device(job, rank, rank.rank, nccl_options());
    const zr_view all = view_on(device, device.allocate(4000), 1000);
    EXPECT_EQ(device.submit(zr::all_reduce(all, all, "x")), ZR_OK) << device.comm().said();
    device.stream().synchronize();
  }));
  ::unsetenv("ZR_SIM_NCCL_REGISTERED");
}

// The stream of rank 0 waits for rank 1 while the rank itself does not call the communicator.
TEST_F(CommNcclLifeTest, AnErrorWhileOnlyTheStreamWaitsEndsTheWaitAndIsReported) {
  auto* const is_submitted = static_cast<std::atomic<bool>*>(
      ::mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(is_submitted), MAP_FAILED);
  const auto ranks = run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    DeviceRank device(job, rank, rank.rank, nccl_options());
    const zr_view all = view_on(device, device.allocate(4000), 1000);
    static const std::atomic<bool> is_open{false};
    if (rank.rank == 1) device.stream().wait_for(is_open);
    zr_done* const done = done_new(device.comm().host().abi());
    EXPECT_EQ(device.submit(zr::all_reduce(all, all, "first"), done), ZR_OK) << device.comm().said();
    if (rank.rank == 1) {
      while (!*is_submitted) ::sched_yield();
      ::raise(SIGKILL);
    }
    *is_submitted = true;
    device.stream().synchronize();
    EXPECT_EQ(done_poll(done, nullptr), ZR_COMM) << "what the stream has read is undefined";
    done_release(done);
    zr_error error = zr::no_error();
    EXPECT_EQ(device.comm().api().progress(device.comm().comm(), &error), ZR_COMM);
    EXPECT_EQ(device.submit(zr::all_reduce(all, all, "second")), ZR_COMM);
    EXPECT_THAT(device.comm().said(),
                HasSubstr("all_reduce 'second': NCCL: remote process exited or there was a network error"));
  });
  EXPECT_TRUE(ranks[0].ok()) << ranks[0].threw;
  EXPECT_EQ(ranks[1].signal, SIGKILL);
  ::munmap(is_submitted, sizeof(std::atomic<bool>));
}

TEST_F(CommNcclLifeTest, AKilledPeerEndsCallsOnHostMemory) {
  const auto ranks = run_sim_ranks(2, [&](const SharedJob& job, Rank& rank) {
    DeviceRank device(job, rank, rank.rank, nccl_options());
    RawComm host(device.rig());
    std::vector<float> x(100);
    const zr_view all{x.data(), 100, ZR_F32, 0, zr::host::kHostMemory};
    EXPECT_EQ(host.submit(zr::all_reduce(all, all, "x")), ZR_OK) << host.said();
    if (rank.rank == 1) ::raise(SIGKILL);
    EXPECT_EQ(host.submit(zr::all_reduce(all, all, "x")), ZR_COMM) << host.said();
  });
  EXPECT_TRUE(ranks[0].ok()) << ranks[0].threw;
  EXPECT_EQ(ranks[1].signal, SIGKILL);
}

}  // namespace
