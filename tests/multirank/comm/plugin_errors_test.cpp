// CommRuntime and completions when a plug-in returns errors, breaks the ABI or throws: the error names the plug-in, its
// function and the problem. One process; the communicator is a fake.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <thread>

#include "multirank/comm/fake_communicator.hpp"
#include "support/comm_rank.hpp"

namespace {

using namespace zr::testing;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::Eq;
using testing::HasSubstr;
using zr::host::CallError;
using zr::host::MemoryKind;
using zr::host::Tier;
using zr::host::comm::CommRuntime;
namespace exit_code = zr::exit_code;

// ---- done_wait() on a completion that a plug-in made for itself ----

// Releases it at the end.
struct OwnDone {
  explicit OwnDone(FakeRank& of) : rank(of), done(of.async().done_new(of.abi())) {}
  ~OwnDone() { rank.async().done_release(done); }
  OwnDone(const OwnDone&) = delete;
  void resolve(zr_code code, int64_t native, const char* text) { rank.async().done_resolve(done, code, native, text); }
  zr_code wait(int64_t timeout_ns, zr_error* error) { return rank.async().done_wait(done, timeout_ns, error); }
  FakeRank& rank;
  zr_done* done;
};

TEST(DoneWaitTest, ReturnsTheErrorOfAPluginsOwnCompletionUnchanged) {
  const std::vector<zr_code> codes{ZR_INVALID,   ZR_NOMEM,    ZR_IO,       ZR_COMM, ZR_TIMEOUT,
                                   ZR_CANCELLED, ZR_MISMATCH, ZR_INTERNAL, 4711};
  for (const int world : {1, 2}) {
    FakeRank rank(world);
    const auto comm = rank.open();
    for (const zr_code code : codes) {
      OwnDone own(rank);
      own.resolve(code, 42, "the disk is full");
      CallError error;
      EXPECT_EQ(own.wait(-1, &error), code) << world;
      EXPECT_EQ(error.code, code);
      EXPECT_EQ(error.native, 42);
      EXPECT_STREQ(error.msg, "the disk is full");
      EXPECT_EQ(comm->take_failure(), nullptr) << "the failure belongs to the plug-in";
    }
    EXPECT_FALSE(rank.job_has_failed());
    comm->barrier("the communicator still works");
  }
}

TEST(DoneWaitTest, ReturnsTheErrorWithWhichAThreadResolvesAPluginsOwnCompletion) {
  for (const int world : {1, 2}) {
    FakeRank rank(world);
    const auto comm = rank.open();
    OwnDone own(rank);
    std::jthread thread([&] {
      std::this_thread::sleep_for(20ms);
      own.resolve(ZR_IO, 42, nullptr);
    });
    CallError error;
    EXPECT_EQ(own.wait(-1, &error), ZR_IO);
    EXPECT_EQ(error.native, 42);
    EXPECT_STREQ(error.msg, "");
    EXPECT_EQ(comm->take_failure(), nullptr);
  }
}

TEST(DoneWaitTest, TimeoutOfAPluginsOwnCompletionDoesNotFailTheJob) {
  for (const int world : {1, 2}) {
    FakeRank rank(world, 100ms);
    int aborts = 0;
    fake->abort = [&] { ++aborts; };
    const auto comm = rank.open();
    OwnDone own(rank);
    CallError error;
    EXPECT_EQ(own.wait(1000000, &error), ZR_TIMEOUT);
    EXPECT_STREQ(error.msg, "the completion was not resolved within the timeout");
    EXPECT_EQ(own.wait(300000000, &error), ZR_TIMEOUT) << "longer than communicator.timeout";
    EXPECT_STREQ(error.msg, "the completion was not resolved within the timeout");
    EXPECT_EQ(own.wait(-1, &error), ZR_TIMEOUT);
    EXPECT_STREQ(error.msg, "the completion was not resolved within communicator.timeout (0.1s)");
    EXPECT_EQ(comm->take_failure(), nullptr);
    EXPECT_FALSE(rank.job_has_failed());
    EXPECT_EQ(aborts, 0);
    comm->barrier("the communicator still works");
  }
}

TEST(DoneWaitTest, FailureOfTheJobEndsTheWaitForAPluginsOwnCompletion) {
  FakeRank rank;
  const auto comm = rank.open();
  OwnDone own(rank);
  std::jthread thread([&] {
    std::this_thread::sleep_for(20ms);
    rank.job.break_job("rank 1 was killed by signal 9");
  });
  CallError error;
  EXPECT_EQ(own.wait(-1, &error), ZR_COMM);
  EXPECT_STREQ(error.msg, "the job has failed");
  expect_failure([&] { std::rethrow_exception(comm->take_failure()); }, exit_code::peer_lost,
                 AllOf(HasSubstr("rank 1 was killed by signal 9"), HasSubstr("this rank: the job has failed")));
}

TEST(DoneWaitTest, ErrorOfTheCommunicatorEndsTheWaitForAPluginsOwnCompletion) {
  FakeRank rank;
  const auto comm = rank.open();
  fake->progress = [](zr_error* error) { return zr::host::fill_error(error, ZR_IO, "the device is gone"); };
  OwnDone own(rank);
  CallError error;
  EXPECT_EQ(own.wait(-1, &error), ZR_IO);
  EXPECT_STREQ(error.msg, "communicator 'fake' (fake.so): progress: the device is gone");
  EXPECT_NE(comm->take_failure(), nullptr);
}

TEST(DoneWaitTest, BlamesTheCommunicatorForTheErrorOfACollective) {
  FakeRank rank;
  const auto comm = rank.open();
  fake->submit = [](zr_done* done, zr_error*) {
    zr::host::comm::done_resolve(done, ZR_IO, 42, "the device is gone");
    return ZR_OK;
  };
  OwnDone done(rank);
  CallError error;
  const zr_coll coll = collective(ZR_BARRIER, {}, {}, "end");
  ASSERT_EQ(comm->ref().api->submit(comm->ref().comm, &coll, nullptr, done.done, &error), ZR_OK) << error.msg;
  EXPECT_EQ(done.wait(-1, &error), ZR_IO);
  const std::string text = "communicator 'fake' (fake.so): submit: barrier 'end': the device is gone";
  EXPECT_EQ(error.msg, text);
  expect_failure([&] { std::rethrow_exception(comm->take_failure()); }, exit_code::environment, Eq(text));
}

// A strategy resolves the completion before it submits a collective with it; a world of one has no communicator.
TEST(DoneWaitTest, ReportsTheErrorOfACollectiveInAWorldOfOne) {
  FakeRank rank(1);
  const auto comm = rank.open();
  OwnDone done(rank);
  done.resolve(ZR_IO, 0, "resolved by the wrong plug-in");
  CallError error;
  const zr_coll coll = collective(ZR_BARRIER, {}, {}, "end");
  ASSERT_EQ(comm->ref().api->submit(comm->ref().comm, &coll, nullptr, done.done, &error), ZR_OK) << error.msg;
  EXPECT_EQ(done.wait(-1, &error), ZR_IO);
  EXPECT_STREQ(error.msg, "submit: resolved by the wrong plug-in");
}

// ---- outputs that the ABI forbids ----

TEST(CommRuntimePluginTest, RejectsOpenThatLeavesTheCommunicatorNull) {
  FakeRank rank;
  fake->open = [](void**, zr_error*) { return ZR_OK; };
  expect_failure([&] { rank.open(); }, exit_code::internal,
                 Eq("communicator 'fake' (fake.so): open reported success, but left *comm null; this is a bug in the "
                    "plug-in"));
}

TEST(CommRuntimePluginTest, ReportsRanksThatDisagreeAsALostPeer) {
  FakeRank rank;
  fake->open = [](void**, zr_error* error) {
    return zr::host::fill_error(error, ZR_MISMATCH, "rank 1 has another topology");
  };
  expect_failure([&] { rank.open(); }, exit_code::peer_lost,
                 Eq("communicator 'fake' (fake.so): open: rank 1 has another topology"));
}

TEST(CommRuntimePluginTest, RejectsMemoryThatIsNotAligned) {
  FakeRank rank;
  const auto comm = rank.open();
  const auto fails = [&](int64_t offset, int64_t align, const std::string& problem) {
    fake->mem_alloc = [offset](uint64_t bytes, zr_view* out) {
      *out = {fake->allocate(bytes) + offset, static_cast<int64_t>(bytes), ZR_U8, 0, {ZR_DEVICE_CPU, 0}};
      return ZR_OK;
    };
    expect_failure([&] { comm->allocate(100, align, Tier::host, MemoryKind::other, "test"); }, exit_code::internal,
                   Eq("communicator 'fake' (fake.so): mem_alloc: " + problem + ": this is a bug in the plug-in"));
  };
  fails(8, 64, "the memory is not aligned to 64 bytes");
  fails(32, 8, "the memory is not aligned to 64 bytes");
  fails(64, 4096, "the memory is not aligned to 4096 bytes");
}

TEST(CommRuntimePluginTest, RejectsSharedWeightsThatAreNotTwoMappings) {
  FakeRank rank;
  const auto comm = rank.open();
  char* const page = fake->allocate(4096);
  const auto allocate = [&] { return comm->allocate_shared(4096, 2048, Tier::device, MemoryKind::weights, "weights"); };
  const auto fails = [&](char* writer, const char* reader, const std::string& problem) {
    fake->shared_alloc = [writer, reader](void** writable, const void** readable) {
      *writable = writer;
      *readable = reader;
      return ZR_OK;
    };
    expect_failure(
        allocate, exit_code::internal,
        Eq("communicator 'fake' (fake.so): shared_weights alloc: " + problem + ": this is a bug in the plug-in"));
  };
  fails(nullptr, page, "*writer is null");
  fails(page, nullptr, "*reader is null");
  const std::string boundary = fmt::format(" does not begin at a page boundary ({} bytes)", ::sysconf(_SC_PAGESIZE));
  fails(page + 64, page, "*writer" + boundary);
  fails(page, page + 8, "*reader" + boundary);
  fake->shared_alloc = [page](void** writable, const void** readable) {
    *readable = *writable = page;
    return ZR_OK;
  };
  EXPECT_EQ(allocate(), (std::pair<void*, const void*>(page, page)));
}

// ---- exceptions of the plug-in ----

const std::string kThrew = ": threw an exception across the C ABI: no peers; this is a bug in the plug-in";

zr_code throws() { throw std::runtime_error("no peers"); }

TEST(CommRuntimePluginTest, ReportsAnExceptionByTheFunctionThatThrewIt) {
  FakeRank rank;
  const auto fails = [&](const std::function<void()>& act, const std::string& call) {
    expect_failure(act, exit_code::internal, Eq("communicator 'fake' (fake.so): " + call + kThrew));
  };
  const auto caps = std::exchange(fake->caps, [](zr_comm_caps*) { return throws(); });
  fails([&] { rank.open(); }, "caps");
  fake->caps = caps;
  const auto open = std::exchange(fake->open, [](void**, zr_error*) { return throws(); });
  fails([&] { rank.open(); }, "open");
  fake->open = open;
  const auto mem_alloc = std::exchange(fake->mem_alloc, [](uint64_t, zr_view*) { return throws(); });
  fails([&] { rank.open(); }, "mem_alloc");
  fake->mem_alloc = mem_alloc;
  const auto comm = rank.open();
  fake->submit = [](zr_done*, zr_error*) { return throws(); };
  fails([&] { comm->barrier("end"); }, "submit: barrier 'end'");
  uint8_t bytes[2] = {};
  const zr_coll composed = collective(ZR_BROADCAST, view(bytes, 2, ZR_U8), view(bytes, 2, ZR_U8), "w");
  fails([&] { comm->run(composed); }, "submit: broadcast 'w' (uint8, 2)");
  fake->shared_alloc = [](void**, const void**) { return throws(); };
  fails([&] { comm->allocate_shared(64, 64, Tier::device, MemoryKind::weights, "w"); }, "shared_weights alloc");
}

TEST(CommRuntimePluginTest, ReportsAnExceptionToThePluginThatSubmitted) {
  FakeRank rank;
  const auto comm = rank.open();
  const zr_comm_ref ref = comm->ref();
  OwnDone done(rank);
  CallError error;
  const zr_coll coll = collective(ZR_BARRIER, {}, {}, "end");
  fake->submit = [](zr_done*, zr_error*) -> zr_code { throw 42; };
  EXPECT_EQ(ref.api->submit(ref.comm, &coll, nullptr, done.done, &error), ZR_INTERNAL);
  EXPECT_STREQ(error.msg,
               "communicator 'fake' (fake.so): submit: barrier 'end': threw an exception across the C ABI; this is a "
               "bug in the plug-in");
  fake->progress = [](zr_error*) { return throws(); };
  EXPECT_EQ(ref.api->progress(ref.comm, &error), ZR_INTERNAL);
  EXPECT_EQ(error.msg, "communicator 'fake' (fake.so): progress" + kThrew);
}

TEST(CommRuntimePluginTest, LogsAnExceptionOfAFunctionThatReturnsNoCode) {
  FakeRank rank;
  fake->abort = fake->close = fake->shared_free = [] { throws(); };
  fake->mem_free = [](const zr_view&) { throws(); };
  auto comm = rank.open();
  char* const page = fake->allocate(4096);
  fake->shared_alloc = [page](void** writable, const void** readable) {
    *readable = *writable = page;
    return ZR_OK;
  };
  void* const memory = comm->allocate(100, 64, Tier::host, MemoryKind::other, "test");
  void* const shared = comm->allocate_shared(100, 100, Tier::device, MemoryKind::weights, "w").first;
  const auto logs = [&](const std::function<void()>& act, const std::string& call) {
    testing::internal::CaptureStderr();
    act();
    EXPECT_EQ(testing::internal::GetCapturedStderr(),
              "zeroth: error: communicator 'fake' (fake.so): " + call + kThrew + "\n");
  };
  logs([&] { comm->free(memory); }, "mem_free");
  logs([&] { comm->free(shared); }, "shared_weights free");
  logs([&] { comm->abort(); }, "abort");
  logs([&] { comm.reset(); }, "close");
}

// ---- completions that are resolved twice ----

TEST(DoneTest, SecondResolutionNamesTheLibraryOfThePlugin) {
  const SharedJob job;
  CommRig rig(std::make_shared<SharedControl>(job, 0, 2), {.id = "twice"});
  const auto comm = rig.open();
  zr_done* done = zr::host::comm::done_new(rig.host().abi());
  CallError error;
  const zr_coll coll = collective(ZR_BARRIER, {}, {}, "end");
  testing::internal::CaptureStderr();
  EXPECT_EQ(comm->ref().api->submit(comm->ref().comm, &coll, nullptr, done, &error), ZR_OK) << error.msg;
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "zeroth: error: a completion was resolved twice, the second time by " +
                rig.instance().component().file.string() + ": barrier 'end'\n");
  zr::host::comm::done_release(done);
}

TEST(DoneTest, SecondResolutionByUnknownCodeIsLogged) {
  FakeRank rank;
  OwnDone own(rank);
  own.resolve(ZR_OK, 0, nullptr);
  testing::internal::CaptureStderr();
  own.resolve(ZR_IO, 0, "late");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "zeroth: error: a plug-in resolved a completion twice\n");
  EXPECT_EQ(zr::host::comm::done_poll(own.done, nullptr), ZR_OK);
}

}  // namespace
