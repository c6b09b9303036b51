// PeerDevice for CUDA: memory and events through CUDA IPC.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "peer_device.hpp"
#include "zr/base.hpp"

namespace peer {

namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
constexpr int64_t kMaxBlocks = 4096;

struct Reduction {
  const void* sources[kMaxRanks];
  void* outs[kMaxRanks];
  int32_t n, n_outs;
  int64_t first, count;
  bool accumulate, vectors;  // vectors: all addresses permit vector loads and stores
};

template <class T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(T));
  T element[kElements];
};
// The elements of a vector of In, as Out; fp32 from bf16 or fp16 takes two vectors.
template <class In, class Out>
struct alignas(kVectorBytes) Result {
  Out element[Vector<In>::kElements];
};

template <class In, class Out, class Op>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ Reduction r) {
  using Source = typename In::Stored;
  using Sum = typename In::Accumulated;
  using Stored = typename Out::Stored;
  constexpr int kElements = Vector<Source>::kElements;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t done = 0;
  if (r.vectors) {
    done = r.count / kElements * kElements;
    for (int64_t at = thread * kElements; at < done; at += threads * kElements) {
      Sum sum[kElements];
      auto x = *reinterpret_cast<const Vector<Source>*>(static_cast<const Source*>(r.sources[0]) + r.first + at);
      if (r.accumulate) {
        const auto held =
            *reinterpret_cast<const Result<Source, Stored>*>(static_cast<const Stored*>(r.outs[0]) + r.first + at);
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] = Op::apply(Out::upcast(held.element[i]), In::upcast(x.element[i]));
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] = Op::first(In::upcast(x.element[i]));
      }
      for (int32_t s = 1; s < r.n; ++s) {
        x = *reinterpret_cast<const Vector<Source>*>(static_cast<const Source*>(r.sources[s]) + r.first + at);
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] = Op::apply(sum[i], In::upcast(x.element[i]));
      }
      Result<Source, Stored> result;
#pragma unroll
      for (int i = 0; i < kElements; ++i) result.element[i] = Out::downcast(sum[i]);
      for (int32_t o = 0; o < r.n_outs; ++o)
        *reinterpret_cast<Result<Source, Stored>*>(static_cast<Stored*>(r.outs[o]) + r.first + at) = result;
    }
  }
  for (int64_t at = done + thread; at < r.count; at += threads) {
    const auto source = [&](int32_t s) { return In::upcast(static_cast<const Source*>(r.sources[s])[r.first + at]); };
    Sum sum = r.accumulate ? Op::apply(Sum(Out::upcast(static_cast<const Stored*>(r.outs[0])[r.first + at])), source(0))
                           : Op::first(source(0));
    for (int32_t s = 1; s < r.n; ++s) sum = Op::apply(sum, source(s));
    for (int32_t o = 0; o < r.n_outs; ++o) static_cast<Stored*>(r.outs[o])[r.first + at] = Out::downcast(sum);
  }
}

[[noreturn]] void fail(cudaError_t error, const std::string& call) {
  cudaGetLastError();  // forgets it: the next launch reads it
  if (error == cudaErrorNoKernelImageForDevice)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "this library has no code for the compute capability of this GPU: build it with "
                          "ZR_CUDA_ARCHITECTURES, or set offload.optimizer = \"cpu\" to exchange in host memory",
                          error);
  throw zr::PluginError(error == cudaErrorMemoryAllocation ? ZR_NOMEM : ZR_IO,
                        "CUDA: " + call + ": " + cudaGetErrorString(error), error);
}
void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) fail(error, call);
}
void check_peer(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw zr::PluginError(ZR_COMM,
                        std::string("CUDA: ") + call + ": " + cudaGetErrorString(error) +
                            ": the memory of another rank's GPU cannot be opened; start all ranks in one container "
                            "with the same visible GPUs, or set offload.optimizer = \"cpu\" to exchange in host memory",
                        error);
}

// While it lives, the device is the current one of the thread. The next call reports a failure.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) noexcept {
    changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != device;
    if (changed_) cudaSetDevice(device);
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

bool is_aligned(const void* address, int64_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

template <class In, class Out, class Op>
void launch(Reduction& r, cudaStream_t stream) {
  constexpr int64_t kElements = Vector<typename In::Stored>::kElements;
  const int64_t in = sizeof(typename In::Stored), out = sizeof(typename Out::Stored);
  r.vectors = true;
  for (int i = 0; i < r.n; ++i)
    r.vectors &= is_aligned(static_cast<const char*>(r.sources[i]) + r.first * in, kVectorBytes);
  for (int i = 0; i < r.n_outs; ++i)
    r.vectors &= is_aligned(static_cast<char*>(r.outs[i]) + r.first * out, kVectorBytes);
  const int64_t work = r.vectors ? (r.count + kElements - 1) / kElements : r.count;
  const int64_t blocks = std::min(kMaxBlocks, (work + kThreads - 1) / kThreads);
  reduce_kernel<In, Out, Op><<<static_cast<uint32_t>(blocks), kThreads, 0, stream>>>(r);
  check(cudaGetLastError(), "reduction");
}

template <class In, class Out>
void launch_as(uint32_t reduce, Reduction& r, cudaStream_t stream) {
  if (reduce == ZR_SUM) return launch<In, Out, zr::SumOp>(r, stream);
  if (reduce == ZR_MIN) return launch<In, Out, zr::MinOp>(r, stream);
  launch<In, Out, zr::MaxOp>(r, stream);
}

class CudaDevice final : public PeerDevice {
 public:
  CudaDevice(int number, int world) : number_(number), peers_(static_cast<size_t>(world)) {
    const CurrentDevice current(number_);
    for (cudaEvent_t& event : own_)
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess), "cudaEventCreate");
  }
  ~CudaDevice() override {
    close_events();
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
  void free(void* memory) noexcept override { cudaFree(memory); }
  void* open(const Handle& memory) override {
    const CurrentDevice current(number_);
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, memory.bytes, sizeof ipc);
    void* opened = nullptr;
    check_peer(cudaIpcOpenMemHandle(&opened, ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return opened;
  }
  void close(void* opened) noexcept override {
    const CurrentDevice current(number_);
    cudaIpcCloseMemHandle(opened);
  }

  Handle event(Event event) override {
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
    check_peer(cudaIpcOpenEventHandle(&peers_[static_cast<size_t>(rank)][static_cast<size_t>(event)], ipc),
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
    Reduction r{};
    std::copy(sources, sources + n, r.sources);
    std::copy(outs, outs + n_outs, r.outs);
    r.n = n;
    r.n_outs = n_outs;
    r.first = first;
    r.count = count;
    r.accumulate = kind.accumulate;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (kind.src) {
      case ZR_F32: return launch_as<zr::F32Element, zr::F32Element>(kind.reduce, r, on);
      case ZR_F64: return launch_as<zr::F64Element, zr::F64Element>(kind.reduce, r, on);
      case ZR_BF16:
        if (kind.dst == ZR_F32) return launch_as<zr::Bf16Element, zr::F32Element>(kind.reduce, r, on);
        return launch_as<zr::Bf16Element, zr::Bf16Element>(kind.reduce, r, on);
      case ZR_F16:
        if (kind.dst == ZR_F32) return launch_as<zr::F16Element, zr::F32Element>(kind.reduce, r, on);
        return launch_as<zr::F16Element, zr::F16Element>(kind.reduce, r, on);
      case ZR_I8: return launch_as<zr::IntElement<int8_t>, zr::IntElement<int8_t>>(kind.reduce, r, on);
      case ZR_U8: return launch_as<zr::IntElement<uint8_t>, zr::IntElement<uint8_t>>(kind.reduce, r, on);
      case ZR_I32: return launch_as<zr::IntElement<int32_t>, zr::IntElement<int32_t>>(kind.reduce, r, on);
      default: return launch_as<zr::IntElement<int64_t>, zr::IntElement<int64_t>>(kind.reduce, r, on);
    }
  }
  void call(void (*fn)(void*), void* context, void* stream) override {
    const CurrentDevice current(number_);
    check(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), fn, context), "cudaLaunchHostFunc");
  }
  bool is_idle(void* stream) noexcept override {
    const CurrentDevice current(number_);
    return cudaStreamQuery(static_cast<cudaStream_t>(stream)) != cudaErrorNotReady;
  }
  void abort() noexcept override {}  // CUDA has no call that ends the wait of a stream

 private:
  const int number_;
  std::array<cudaEvent_t, 2> own_{};
  std::vector<std::array<cudaEvent_t, 2>> peers_;  // by rank
};

}  // namespace

namespace {
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
