// Ranks whose communicator moves memory of the simulated device of tests/simulators/sim_device, called through its C
// table.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/device_memory.hpp"
#include "multirank/comm/cases.hpp"
#include "support/comm_rig.hpp"
#include "support/forked_ranks.hpp"

namespace zr::testing {

inline constexpr int32_t kSimType = 12;  // the device type of libtorch's PrivateUse1

/// Loads the simulated device's library.
inline void load_sim_device() {
  if (!::dlopen(ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so", RTLD_NOW | RTLD_GLOBAL))
    throw std::runtime_error(::dlerror());
}
inline RigOptions on_sim(RigOptions options) {
  options.device = "sim";
  return options;
}

template <class Function>
Function* device_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

/// A stream of one simulated device, by default the default stream; all other functions are of the engine alone.
class SimStream final : public host::DeviceMemory {
 public:
  explicit SimStream(int32_t number, int id = 0) : number_(number), id_(id) {}
  zr_device device() const override { return {kSimType, number_}; }
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
  void call(const std::function<void()>& fn) override { fn(); }
  std::unique_ptr<host::PinnedMemory> allocate_pinned(int64_t) override { return nullptr; }
  std::unique_ptr<host::CopyStream> new_copy_stream() override { return nullptr; }
  void* native_stream() override { return device_function<void*(int, int)>("zr_sim_stream")(number_, id_); }
  /// Enqueues on the stream: waits until `is_open`, which lives longer.
  void wait_for(const std::atomic<bool>& is_open) {
    device_function<void(void*, const char*, void (*)(void*), void*)>("zr_sim_enqueue")(
        native_stream(), "wait for test",
        [](void* context) {
          while (!static_cast<const std::atomic<bool>*>(context)->load()) std::this_thread::yield();
        },
        const_cast<std::atomic<bool>*>(&is_open));
  }
  /// Enqueues on the stream: adds 1 to each element.
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
        native_stream(), "add one", run, new Task{static_cast<float*>(backing(memory)), count});
  }
  /// The content of memory of the device now, without waiting for streams.
  template <class T>
  static T peek(const void* memory) {
    T value;
    std::memcpy(&value, backing(memory), sizeof value);
    return value;
  }
  void synchronize() { device_function<void(void*)>("zr_sim_wait")(native_stream()); }

 private:
  static void* backing(const void* memory) { return device_function<void*(const void*)>("zr_sim_backing")(memory); }
  const int32_t number_;
  const int id_;
};

/// One rank with its open communicator for the memory of its device.
class DeviceRank {
 public:
  /// `device`: its number; `stream`: a stream of it. `options.device` is replaced.
  DeviceRank(const SharedJob& job, Rank& rank, int32_t device, RigOptions options = {}, int stream = 0)
      : DeviceRank(std::make_shared<SharedControl>(job, rank.rank, rank.world), device, std::move(options), stream) {}
  DeviceRank(std::shared_ptr<host::control::Control> control, int32_t device, RigOptions options = {}, int stream = 0)
      : stream_((load_sim_device(), device), stream),
        rig_(std::move(control), on_sim(std::move(options))),
        comm_(rig_, stream_.device()) {}

  SimStream& stream() { return stream_; }
  CommRig& rig() { return rig_; }
  RawComm& comm() { return comm_; }
  int rank() const { return comm_.rank(); }
  int world() const { return comm_.world(); }
  zr_code submit(const zr_coll& coll, zr_done* done = nullptr) { return comm_.submit(coll, done, stream_.abi()); }

  /// Memory that peers can read, if the communicator has such memory.
  void* allocate(int64_t bytes) { return comm_.api().mem_alloc ? comm_.allocate(bytes) : stream_.allocate(bytes); }
  void free(void* memory) { comm_.api().mem_alloc ? comm_.free(memory) : stream_.free(memory); }

  /// Runs a collective whose views are in host memory, on copies on the device.
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

  /// The cases' memory that peers can read: a block of the host with a copy on the device.
  Bench bench() {
    return {rank(), world(), [this](const zr_coll& coll) { run(coll); },
            [this](int64_t bytes) {
              Block block{std::vector<char>(static_cast<std::size_t>(bytes)), allocate(bytes)};
              char* const at = block.host.data();
              blocks_.emplace(at, std::move(block));
              return static_cast<void*>(at);
            },
            [this](void* host) {
              const auto at = blocks_.find(static_cast<char*>(host));
              free(at->second.device);
              blocks_.erase(at);
            }};
  }

 private:
  struct Block {
    std::vector<char> host;
    void* device;
  };
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

/// Runs `body` in each rank, with random delays of all tasks on streams.
inline std::vector<RankResult> run_sim_ranks(int world, const std::function<void(const SharedJob&, Rank&)>& body) {
  const SharedJob job;
  RankOptions options;
  options.limit = std::chrono::seconds(300);
  return run_ranks(
      world,
      [&](Rank& rank) {
        ::setenv("ZR_SIM_DELAY_US", "100", 1);
        ::setenv("ZR_SIM_SEED", std::to_string(rank.rank + 1).c_str(), 1);
        ::setenv("ZR_SIM_BYTES", "134217728", 1);
        body(job, rank);
      },
      options);
}

inline zr_view view_on(DeviceRank& rank, void* data, int64_t count) {
  return {data, count, ZR_F32, 0, rank.stream().device()};
}

inline const std::vector<Home> kHomes{Home::shared, Home::own, Home::mixed};

/// Compares the cases of these types with their references, with memory of one of the homes after the other.
inline void check_every_operation(const Bench& bench, const std::vector<zr_dtype>& dtypes, int64_t scale,
                                  const std::vector<Home>& homes) {
  Memory memory(bench, 64 << 10);
  uint64_t seed = 1;
  for (const zr_dtype dtype : dtypes)
    for (const Case& c : cases(bench.world, dtype, scale)) {
      seed += 1000;
      check(bench, memory, c, homes[(seed / 1000) % homes.size()], seed);
    }
}

}  // namespace zr::testing
