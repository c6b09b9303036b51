// The communicator "shm" for memory of a device, on the simulated device of tests/support/sim_device: compared with
// scalar references, and its errors.
#include <dlfcn.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "base/device_memory.hpp"
#include "multirank/comm/cases.hpp"
#include "support/comm_rank.hpp"

namespace {

using namespace zr::testing;
using ::testing::HasSubstr;
using zr::host::comm::done_new;
using zr::host::comm::done_poll;
using zr::host::comm::done_release;

constexpr int32_t kType = 12;  // the device type of libtorch's PrivateUse1

template <class Function>
Function* device_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

// The default stream of one simulated device; all other functions are of the engine alone.
class SimStream final : public zr::host::DeviceMemory {
 public:
  explicit SimStream(int32_t number) : number_(number) {}
  zr_device device() const override { return {kType, number_}; }
  void* allocate(int64_t bytes) override {
    return device_function<void*(int, uint64_t)>("zr_sim_allocate")(number_, static_cast<uint64_t>(bytes));
  }
  void free(void* memory) noexcept override { device_function<void(void*)>("zr_sim_free")(memory); }
  void zero(const zr_view&) override {}
  void copy(const zr_view&, const zr_view&) override {}
  void add(const zr_view&, const zr_view&, bool) override {}
  int64_t count_non_finite(const zr_view&) override { return 0; }
  void upload(const void* from, void* to, int64_t bytes) override {
    synchronize();
    std::memcpy(backing(to), from, static_cast<std::size_t>(bytes));
  }
  void download(const void* from, void* to, int64_t bytes) override {
    synchronize();
    std::memcpy(to, backing(from), static_cast<std::size_t>(bytes));
  }
  void run(const std::function<void(zr_stream*)>& work) override { work(abi()); }
  void* native_stream() override { return device_function<void*(int, int)>("zr_sim_stream")(number_, 0); }
  // Enqueues it on the stream.
  void add_one(float* memory, int64_t count) {
    struct Task {
      float* memory;
      int64_t count;
    };
    const auto run = [](void* context) {
      const std::unique_ptr<Task> task(static_cast<Task*>(context));
      for (int64_t i = 0; i < task->count; ++i) task->memory[i] += 1;
    };
    device_function<void(void*, const char*, void (*)(void*), void*)>("zr_sim_enqueue")(
        native_stream(), "add one", run, new Task{reinterpret_cast<float*>(backing(memory)), count});
  }
  void synchronize() { device_function<void(void*)>("zr_sim_wait")(native_stream()); }

 private:
  static char* backing(const void* memory) { return device_function<char*(const void*)>("zr_sim_backing")(memory); }
  const int32_t number_;
};

// One rank with its open communicator for the memory of its device.
class DeviceRank {
 public:
  DeviceRank(const SharedJob& job, Rank& rank)
      : stream_((load(), rank.rank % 2)),
        rig_(std::make_shared<SharedControl>(job, rank.rank, rank.world), options()),
        comm_(rig_, stream_.device()) {}

  SimStream& stream() { return stream_; }
  RawComm& comm() { return comm_; }
  int rank() const { return comm_.rank(); }
  int world() const { return comm_.world(); }
  zr_code submit(const zr_coll& coll, zr_done* done = nullptr) { return comm_.submit(coll, done, stream_.abi()); }

  // Runs a collective whose views are in host memory, on copies on the device.
  void run(const zr_coll& given) {
    zr_coll coll = given;
    zr_view* const views[] = {&coll.src, &coll.dst};
    // Memory that peers cannot open: one block for both views, which may overlap.
    char *low = nullptr, *high = nullptr;
    for (const zr_view* view : views) {
      char* const begin = static_cast<char*>(view->data);
      if (view->count == 0 || block_of(begin)) continue;
      char* const end = begin + view->count * width_of(view->dtype);
      low = low ? std::min(low, begin) : begin;
      high = high ? std::max(high, end) : end;
    }
    char* const own = low ? static_cast<char*>(stream_.allocate(high - low)) : nullptr;
    if (own) stream_.upload(low, own, high - low);
    const auto on_device = [&](void* host) -> void* {
      char* const at = static_cast<char*>(host);
      if (const auto* block = block_of(at)) return static_cast<char*>(block->second.device) + (at - block->first);
      return own + (at - low);
    };
    for (zr_view* view : views) {
      if (view->count == 0) continue;
      void* const host = view->data;
      view->data = on_device(host);
      view->device = stream_.device();
      stream_.upload(host, view->data, view->count * width_of(view->dtype));
    }
    if (submit(coll) != ZR_OK) throw std::runtime_error("submit: " + comm_.said());
    if (coll.dst.count > 0)
      stream_.download(coll.dst.data, given.dst.data, given.dst.count * width_of(given.dst.dtype));
    if (own) {
      stream_.synchronize();
      stream_.free(own);
    }
  }

  // The cases' memory that peers can read: a block of the host with a copy on the device.
  Bench bench() {
    return {rank(), world(), [this](const zr_coll& coll) { run(coll); },
            [this](int64_t bytes) {
              Block block{std::vector<char>(static_cast<std::size_t>(bytes)), comm_.allocate(bytes)};
              char* const at = block.host.data();
              blocks_.emplace(at, std::move(block));
              return static_cast<void*>(at);
            },
            [this](void* host) {
              const auto at = blocks_.find(static_cast<char*>(host));
              comm_.free(at->second.device);
              blocks_.erase(at);
            }};
  }

 private:
  struct Block {
    std::vector<char> host;
    void* device;
  };
  static void load() {
    if (!::dlopen(ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so", RTLD_NOW | RTLD_GLOBAL))
      throw std::runtime_error(::dlerror());
  }
  static RigOptions options() {
    RigOptions options;
    options.device = "sim";
    return options;
  }
  std::map<char*, Block>::value_type* block_of(char* host) {
    auto next = blocks_.upper_bound(host);
    if (next == blocks_.begin()) return nullptr;
    --next;
    return host < next->first + next->second.host.size() ? &*next : nullptr;
  }

  SimStream stream_;
  CommRig rig_;
  RawComm comm_;
  std::map<char*, Block> blocks_;
};

class CommDeviceTest : public ::testing::TestWithParam<int> {
 protected:
  void on_ranks(int world, const std::function<void(DeviceRank&)>& body) {
    const SharedJob job;
    RankOptions options;
    options.limit = std::chrono::seconds(300);
    expect_success(run_ranks(
        world,
        [&](Rank& rank) {
          ::setenv("ZR_SIM_DELAY_US", "100", 1);
          ::setenv("ZR_SIM_SEED", std::to_string(rank.rank + 1).c_str(), 1);
          ::setenv("ZR_SIM_BYTES", "134217728", 1);
          DeviceRank device(job, rank);
          body(device);
        },
        options));
  }
};

const std::vector<Home> kHomes{Home::shared, Home::own, Home::mixed};

TEST_P(CommDeviceTest, EveryOperationMatchesReferenceForEveryType) {
  on_ranks(GetParam(), [](DeviceRank& rank) {
    const Bench bench = rank.bench();
    Memory memory(bench, 64 << 10);
    uint64_t seed = 1;
    for (const zr_dtype dtype : kDtypes)
      for (const Case& c : cases(rank.world(), dtype, 7)) {
        seed += 1000;
        check(bench, memory, c, kHomes[(seed / 1000) % 3], seed);
      }
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

INSTANTIATE_TEST_SUITE_P(Ranks, CommDeviceTest, ::testing::Values(2, 3, 4),
                         [](const auto& info) { return "On" + std::to_string(info.param); });

class CommDeviceLifeTest : public CommDeviceTest {};

zr_view view_on(DeviceRank& rank, void* data, int64_t count) {
  return {data, count, ZR_F32, 0, rank.stream().device()};
}

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
      DeviceRank device(job, rank);
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
    for (int seed = 0; seed < 8 && !found; ++seed) found = passes(defect, seed) != right;
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

}  // namespace
