// PeerDevice for CUDA: memory and events through CUDA IPC.
#include <cuda_runtime.h>

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda_calls.hpp"
#include "cuda_reduce.hpp"
#include "peer_device.hpp"

namespace peer {

namespace {

static_assert(2 * kMaxRanks <= kMaxReduceAddresses, "a reduction has all ranks as sources and as outs");

class CudaDevice final : public PeerDevice {
 public:
  CudaDevice(int number, int world) : number_(number), peers_(static_cast<size_t>(world)) {
    const CurrentDevice current(number_);
    for (cudaEvent_t& event : own_)
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess), "cudaEventCreate");
  }
  ~CudaDevice() override {
    close_events();
    if (mark_) cudaEventDestroy(mark_);
    for (const cudaEvent_t event : own_)
      if (event) cudaEventDestroy(event);
  }

  // Shared in pages of 2 MiB, so that no page contains several allocations.
  void* allocate(uint64_t bytes, Handle* handle) override {
    constexpr uint64_t kPage = uint64_t{2} << 20;
    const CurrentDevice current(number_);
    bytes = (bytes + kPage - 1) / kPage * kPage;
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    cudaIpcMemHandle_t ipc;
    cudaError_t error = cudaMemset(memory, 0, bytes);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaIpcGetMemHandle(&ipc, memory);
    if (error != cudaSuccess) {
      cudaFree(memory);
      fail(error, "cudaIpcGetMemHandle");
    }
    static_assert(sizeof ipc <= sizeof handle->bytes, "an IPC handle fits");
    std::memcpy(handle->bytes, &ipc, sizeof ipc);
    return memory;
  }
  void free(void* memory) noexcept override {
    const CurrentDevice current(number_);
    cudaFree(memory);
  }
  void* open(const Handle& memory) override {
    const CurrentDevice current(number_);
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, memory.bytes, sizeof ipc);
    void* opened = nullptr;
    check(cudaIpcOpenMemHandle(&opened, ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return opened;
  }
  void close(void* opened) noexcept override {
    const CurrentDevice current(number_);
    cudaIpcCloseMemHandle(opened);
  }

  Handle event(Event event) override {
    const CurrentDevice current(number_);
    Handle handle{};
    cudaIpcEventHandle_t ipc;
    check(cudaIpcGetEventHandle(&ipc, own_[static_cast<size_t>(event)]), "cudaIpcGetEventHandle");
    static_assert(sizeof ipc <= sizeof handle.bytes, "an IPC handle fits");
    std::memcpy(handle.bytes, &ipc, sizeof ipc);
    return handle;
  }
  void open_event(int rank, Event event, const Handle& handle) override {
    const CurrentDevice current(number_);
    cudaIpcEventHandle_t ipc;
    std::memcpy(&ipc, handle.bytes, sizeof ipc);
    check(cudaIpcOpenEventHandle(&peers_[static_cast<size_t>(rank)][static_cast<size_t>(event)], ipc),
          "cudaIpcOpenEventHandle");
  }
  void close_events() noexcept override {
    for (auto& events : peers_)
      for (cudaEvent_t& event : events)
        if (cudaEvent_t const opened = std::exchange(event, nullptr)) cudaEventDestroy(opened);
  }
  void record(Event event, void* stream) override {
    const CurrentDevice current(number_);
    check(cudaEventRecord(own_[static_cast<size_t>(event)], static_cast<cudaStream_t>(stream)), "cudaEventRecord");
  }
  void wait(int rank, Event event, void* stream) override {
    const CurrentDevice current(number_);
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream),
                              peers_[static_cast<size_t>(rank)][static_cast<size_t>(event)], 0),
          "cudaStreamWaitEvent");
  }

  void copy(void* to, const void* from, int64_t bytes, void* stream) override {
    const CurrentDevice current(number_);
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
          "cudaMemcpyAsync");
  }
  void reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* const* outs, int n_outs,
              int64_t first, int64_t count, void* stream) override {
    const CurrentDevice current(number_);
    cuda_reduce(kind, sources, n, outs, n_outs, first, count, static_cast<cudaStream_t>(stream));
  }
  void call(void (*fn)(void*), void* context, void* stream) override {
    const CurrentDevice current(number_);
    check(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), fn, context), "cudaLaunchHostFunc");
  }
  void set_mark(void* stream) override {
    const CurrentDevice current(number_);
    if (!mark_) check(cudaEventCreateWithFlags(&mark_, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaEventRecord(mark_, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
  }
  bool mark_is_reached() noexcept override {
    const CurrentDevice current(number_);
    const bool reached = !mark_ || cudaEventQuery(mark_) != cudaErrorNotReady;
    cudaGetLastError();  // forgets that it was not ready: libtorch's next launch reads it
    return reached;
  }
  void abort() noexcept override {}  // CUDA has no call that ends the wait of a stream

 private:
  const int number_;
  std::array<cudaEvent_t, 2> own_{};
  cudaEvent_t mark_ = nullptr;
  std::vector<std::array<cudaEvent_t, 2>> peers_;  // by rank
};

bool all_devices_can_share() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return false;
  for (int device = 0; device < devices; ++device) {
    int events = 0;
    if (cudaDeviceGetAttribute(&events, cudaDevAttrIpcEventSupport, device) != cudaSuccess || !events) return false;
    for (int other = 0; other < devices; ++other) {
      int access = other == device;
      if (!access && cudaDeviceCanAccessPeer(&access, device, other) != cudaSuccess) return false;
      if (!access) return false;
    }
  }
  return true;
}
}  // namespace

bool can_share_memory() noexcept {
  const bool can = all_devices_can_share();
  cudaGetLastError();  // forgets what a device without it reported
  return can;
}

std::unique_ptr<PeerDevice> open_device(int32_t number, int /*rank*/, int world) {
  return std::make_unique<CudaDevice>(number, world);
}

}  // namespace peer
