// GpuDevice for CUDA.
#include <cuda_runtime.h>
#if __has_include(<nccl.h>)
#include <nccl.h>
#define ZR_HAS_NCCL_HEADER
#endif

#include "../comm_cuda_ipc/cuda_calls.hpp"
#include "../comm_cuda_ipc/cuda_reduce.hpp"
#include "gpu_device.hpp"
#include "nccl_abi.hpp"

namespace nccl {

#ifdef ZR_HAS_NCCL_HEADER
static_assert(static_cast<int>(kSuccess) == ncclSuccess && static_cast<int>(kInvalidArgument) == ncclInvalidArgument &&
              static_cast<int>(kInvalidUsage) == ncclInvalidUsage &&
              static_cast<int>(kRemoteError) == ncclRemoteError && static_cast<int>(kInProgress) == ncclInProgress &&
              kUint8 == ncclUint8);
static_assert(sizeof(Result) == sizeof(ncclResult_t) && sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(Config) <= sizeof(ncclConfig_t) && offsetof(Config, size) == offsetof(ncclConfig_t, size) &&
              offsetof(Config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(Config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
#endif
static_assert(kMaxRanks + 1 <= peer::kMaxReduceAddresses, "a reduction has the sources of all ranks and one out");

namespace {

using peer::check;
using peer::CurrentDevice;

cudaStream_t native(void* stream) { return static_cast<cudaStream_t>(stream); }

class CudaMark final : public Mark {
 public:
  explicit CudaMark(int device) : device_(device) {
    const CurrentDevice current(device_);
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~CudaMark() override { cudaEventDestroy(event_); }
  void record(void* stream) override {
    const CurrentDevice current(device_);
    check(cudaEventRecord(event_, native(stream)), "cudaEventRecord");
  }
  bool is_reached() override {
    const CurrentDevice current(device_);
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // forgets it: libtorch's next launch reads it
      return false;
    }
    check(state, "cudaEventQuery");
    return true;
  }
  void wait(void* stream) override {
    const CurrentDevice current(device_);
    check(cudaStreamWaitEvent(native(stream), event_, 0), "cudaStreamWaitEvent");
  }

 private:
  const int device_;
  cudaEvent_t event_ = nullptr;
};

class CudaDevice final : public GpuDevice {
 public:
  explicit CudaDevice(int number) : number_(number) {
    char id[32] = "";
    check(cudaDeviceGetPCIBusId(id, sizeof id, number), "cudaDeviceGetPCIBusId");
    id_ = id;
  }
  std::string id() const override { return id_; }
  void make_current(const std::function<void()>& call) override {
    const CurrentDevice current(number_);
    call();
  }

  // CurrentDevice would make device 0 the current one again, which makes a context there: hundreds of MB.
  void use_on_this_thread() noexcept override { cudaSetDevice(number_); }

  void* allocate(int64_t bytes) override {
    const CurrentDevice current(number_);
    void* memory = nullptr;
    check(cudaMalloc(&memory, static_cast<size_t>(bytes)), "cudaMalloc");
    return memory;
  }
  void free(void* memory) noexcept override {
    const CurrentDevice current(number_);
    cudaFree(memory);
  }
  void* allocate_host(int64_t bytes) override {
    const CurrentDevice current(number_);
    void* memory = nullptr;
    check(cudaMallocHost(&memory, static_cast<size_t>(bytes)), "cudaMallocHost");
    return memory;
  }
  void free_host(void* memory) noexcept override { cudaFreeHost(memory); }
  void* create_stream() override {
    const CurrentDevice current(number_);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  void destroy_stream(void* stream) noexcept override { cudaStreamDestroy(native(stream)); }
  std::unique_ptr<Mark> make_mark() override { return std::make_unique<CudaMark>(number_); }

  void copy(void* to, const void* from, int64_t bytes, void* stream) override {
    const CurrentDevice current(number_);
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
  }
  void reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* out, int64_t count,
              void* stream) override {
    const CurrentDevice current(number_);
    peer::cuda_reduce(kind, sources, n, &out, 1, 0, count, native(stream));
  }
  void call(void (*fn)(void*), void* context, void* stream) override {
    const CurrentDevice current(number_);
    check(cudaLaunchHostFunc(native(stream), fn, context), "cudaLaunchHostFunc");
  }

 private:
  const int number_;
  std::string id_;
};

}  // namespace

bool has_device() noexcept {
  int devices = 0;
  const bool can = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  cudaGetLastError();  // forgets that there is no driver
  return can;
}

// The engine has chosen the device of the job.
int32_t current_device(const zr::Host&) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

std::unique_ptr<GpuDevice> open_device(int32_t number) { return std::make_unique<CudaDevice>(number); }

}  // namespace nccl
