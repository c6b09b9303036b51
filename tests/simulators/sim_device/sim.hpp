// Internal interface of the simulated accelerator: address translation, streams, generators and tensor helpers.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace zr::test::sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kPoolStreams = 32;  // ids 1..32; id 0 is the default stream; getNewStream() returns higher ids

// Value of an environment variable, or `otherwise` when it is not set. Throws if it is not a number.
uint64_t env_number(const char* name, uint64_t otherwise);
c10::DeviceIndex device_count() noexcept;

// Whether ZR_SIM_BACKEND_DEFECT plants this defect.
bool has_defect(const char* name);
class StreamQueue;
// Called for each wait of a stream for an event of another one: whether a planted defect drops it. Unless the defect
// drops all, the stream is early from then on.
bool drops_wait(StreamQueue& queue);
bool drops_host_wait();  // the same for each wait of the host for an event

// A FIFO of tasks and the thread that runs them. A ticket is the number of tasks enqueued so far; it is finished when
// that many tasks are finished. The thread starts with the first task, so a process can fork before it uses a stream.
class StreamQueue {
 public:
  StreamQueue(c10::DeviceIndex device, c10::StreamId id) : device_(device), id_(id) {}
  // `name` is the source of an error that the task throws. `delayed` tasks start after the random delay.
  uint64_t enqueue(std::string name, std::function<void()> run, bool delayed = true);
  uint64_t last_ticket();
  bool finished(uint64_t ticket);
  bool poll(uint64_t ticket);  // as finished(), for a caller that asks until it is
  // Tasks run before enqueue() returns.
  void set_early(bool early) { is_early_ = early; }
  void wake();  // its thread checks again whether a task may run
  void wait(uint64_t ticket);
  c10::Stream handle() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device_), id_); }

 private:
  struct Task {
    std::string name;
    std::function<void()> run;
    unsigned delay_us;
  };
  void work();
  bool may_run() const;    // the next task
  unsigned delay() const;  // drawn when a task is enqueued

  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable added_, done_;
  std::deque<Task> tasks_;
  uint64_t enqueued_ = 0, finished_ = 0;
  uint64_t wanted_ = 0;  // the last ticket that something has waited for
  std::atomic<bool> is_early_ = false;
  bool started_ = false;
};

StreamQueue& stream_queue(const c10::Stream& stream);
StreamQueue& current_queue(c10::DeviceIndex device);  // of the current stream of the calling thread
std::vector<StreamQueue*> queues_of(c10::DeviceIndex device);
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream pool_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
// Host waits: count as one synchronization and rethrow the first error of a task.
void synchronize(StreamQueue& queue);
void synchronize(StreamQueue& queue, uint64_t ticket);
void synchronize_device(c10::DeviceIndex device);
bool exiting() noexcept;  // the process runs its exit handlers; no task is accepted

// The memory that backs a device address. Only code in a task may dereference the result.
void* backing(const void* device_address);
bool on_device(const void* address);
c10::DeviceIndex device_of(const void* address);
c10::DeviceAllocator& allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
uint64_t draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

// Copies of tensor metadata. kBacking: CPU tensors over the backing memory; kMeta: Meta tensors.
// Tensors that share a storage share it in the copies, too.
class Mirror {
 public:
  enum Kind { kBacking, kMeta };
  explicit Mirror(Kind kind) : kind_(kind) {}
  at::Tensor of(const at::Tensor& tensor);

 private:
  const Kind kind_;
  std::unordered_map<const void*, c10::Storage> storages_;
};
inline at::Tensor backing_tensor(const at::Tensor& tensor) { return Mirror(Mirror::kBacking).of(tensor); }

at::Tensor empty_strided_on(c10::DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType);
// A tensor on the storage of `base`.
at::Tensor view_of(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset,
                   at::ScalarType type);
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);
// The boxed kernel of every operator that has a CPU kernel and no kernel of its own here.
void enqueue_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace zr::test::sim
