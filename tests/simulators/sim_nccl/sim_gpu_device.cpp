// GpuDevice for the simulated device.
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "../sim_device/device_calls.hpp"
#include "gpu_device.hpp"
#include "kernel.hpp"

namespace nccl {

namespace {

using sim::enqueue;
using sim::function_of_device;

constexpr int kOwnStream = 32;  // the last one of libtorch's pool

class SimMark final : public Mark {
 public:
  void record(void* stream) override {
    point_ = std::make_shared<std::atomic<bool>>(false);
    enqueue(stream, "mark", [point = point_] { point->store(true, std::memory_order_release); });
  }
  bool is_reached() override { return !point_ || point_->load(std::memory_order_acquire); }
  void wait(void* stream) override {
    if (!point_) return;
    enqueue(stream, "wait for a mark", [point = point_] {
      while (!point->load(std::memory_order_acquire)) ::sched_yield();
    });
  }

 private:
  std::shared_ptr<std::atomic<bool>> point_;
};

class SimDevice final : public GpuDevice {
 public:
  explicit SimDevice(int number) : number_(number), reduce_(ZR_CHOOSE(reduce_ranks)) {}
  std::string id() const override { return "sim:" + std::to_string(number_); }
  void make_current(const std::function<void()>& call) override { call(); }
  void use_on_this_thread() noexcept override {}

  void* allocate(int64_t bytes) override {
    void* const memory =
        function_of_device<void*(int, uint64_t)>("zr_sim_allocate")(number_, static_cast<uint64_t>(bytes));
    if (!memory)
      throw zr::PluginError(ZR_NOMEM,
                            "the simulated device has no " + std::to_string(bytes) + " bytes; see ZR_SIM_BYTES");
    return memory;
  }
  void free(void* memory) noexcept override { function_of_device<void(void*)>("zr_sim_free")(memory); }
  void* allocate_host(int64_t bytes) override {
    void* const memory = std::malloc(static_cast<size_t>(bytes));
    if (!memory) throw std::bad_alloc();
    host_blocks_[static_cast<char*>(memory)] = bytes;
    return memory;
  }
  void free_host(void* memory) noexcept override {
    host_blocks_.erase(static_cast<char*>(memory));
    std::free(memory);
  }
  void* create_stream() override { return function_of_device<void*(int, int)>("zr_sim_stream")(number_, kOwnStream); }
  void destroy_stream(void*) noexcept override {}
  std::unique_ptr<Mark> make_mark() override { return std::make_unique<SimMark>(); }

  void copy(void* to, const void* from, int64_t bytes, void* stream) override {
    char* const host_to = address(to);
    const char* const host_from = address(from);
    enqueue(stream, "copy", [=] { std::memcpy(host_to, host_from, static_cast<size_t>(bytes)); });
  }
  void reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* out, int64_t count,
              void* stream) override {
    std::vector<const void*> from;
    for (int i = 0; i < n; ++i) from.push_back(address(sources[i]));
    enqueue(stream, "reduce", [=, to = static_cast<void*>(address(out)), reduce = reduce_] {
      reduce(kind, from.data(), n, &to, 1, 0, count, false);
    });
  }
  void call(void (*fn)(void*), void* context, void* stream) override {
    enqueue(stream, "call", [=] { fn(context); });
  }

 private:
  // Where a task finds memory of the device or of allocate_host().
  template <class T>
  char* address(T* memory) const {
    char* const at = const_cast<char*>(static_cast<const char*>(memory));
    const auto next = host_blocks_.upper_bound(at);
    if (next != host_blocks_.begin() && at < std::prev(next)->first + std::prev(next)->second) return at;
    return static_cast<char*>(function_of_device<void*(const void*)>("zr_sim_backing")(memory));
  }

  const int number_;
  decltype(ZR_CHOOSE(reduce_ranks)) const reduce_;
  std::map<char*, int64_t> host_blocks_;  // bytes, by address
};

}  // namespace

bool has_device() noexcept { return ::dlsym(RTLD_DEFAULT, "zr_sim_stream") != nullptr; }

// As the engine chooses the device of a rank.
int32_t current_device(const zr::Host& host) {
  const char* const set = std::getenv("ZR_SIM_DEVICES");
  return host.need<zr_job_service>().local_rank % (set ? std::atoi(set) : 2);
}

std::unique_ptr<GpuDevice> open_device(int32_t number) { return std::make_unique<SimDevice>(number); }

}  // namespace nccl
