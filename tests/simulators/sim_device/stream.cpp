// Streams: one thread per stream, random delays, the counters that tests read.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ParallelGuard.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

std::atomic<uint64_t> pending{0}, synchronizations{0};
std::atomic<uint64_t> delay_seed{env_number("ZR_SIM_SEED", 0)};
std::atomic<unsigned> delay_us{static_cast<unsigned>(env_number("ZR_SIM_DELAY_US", 0))};
std::atomic<bool> is_late{env_number("ZR_SIM_LATE", 0) != 0};
std::atomic<bool> at_exit{false};
thread_local c10::DeviceIndex this_device = 0;
thread_local std::vector<c10::StreamId> this_streams;

// Never destroyed: stream threads run until the process ends.
struct Registry {
  std::mutex mutex;
  std::vector<std::vector<std::unique_ptr<StreamQueue>>> queues;
  std::vector<c10::StreamId> next_pool;
  std::string error;  // of the first task that failed since the last synchronization
  Registry() : queues(static_cast<std::size_t>(device_count())), next_pool(queues.size(), 0) {
    for (std::size_t d = 0; d < queues.size(); ++d)
      for (c10::StreamId id = 0; id <= kPoolStreams; ++id)
        queues[d].push_back(std::make_unique<StreamQueue>(static_cast<c10::DeviceIndex>(d), id));
  }
};
Registry& registry() {
  static auto* const it = new Registry;
  return *it;
}

void rethrow_error() {
  Registry& r = registry();
  std::string error;
  {
    const std::lock_guard lock(r.mutex);
    error.swap(r.error);
  }
  TORCH_CHECK(error.empty(), "sim: asynchronous error in ", error);
}

c10::DeviceIndex checked(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "sim: device index ", static_cast<int>(device),
              " is out of range; ZR_SIM_DEVICES is ", static_cast<int>(device_count()));
  return device;
}

// One thread per kernel: the bits are those of the CPU backend with at::set_num_threads(1).
void use_one_thread() {
  at::internal::lazy_init_num_threads();
  if (auto* omp = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) omp(1);
  if (auto* mkl = reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"))) mkl(1);
}

// Tasks end before libtorch is torn down. A forked child has no stream threads and skips this.
void drain() {
  static const pid_t owner = getpid();
  if (getpid() != owner) return;
  for (c10::DeviceIndex d = 0; d < device_count(); ++d)
    for (StreamQueue* queue : queues_of(d)) queue->wait(queue->last_ticket());
}

// Kernels create static objects of libraries, which are destroyed before exit handlers that were registered earlier.
// The objects of the thread that exits are destroyed before all of these.
struct DrainAtThreadEnd {
  ~DrainAtThreadEnd() { drain(); }
};

const int exit_handler = [] {
  drain();  // remembers the process
  return std::atexit([] {
    drain();
    at_exit = true;
  });
}();

}  // namespace

uint64_t env_number(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::stoull(text);
}

c10::DeviceIndex device_count() noexcept {
  static const auto count = static_cast<c10::DeviceIndex>(env_number("ZR_SIM_DEVICES", 2));
  return count;
}

bool exiting() noexcept { return at_exit; }

uint64_t StreamQueue::enqueue(std::string name, std::function<void()> run, bool delayed) {
  std::unique_lock lock(mutex_);
  if (exiting()) return enqueued_;
  if (!started_) {
    started_ = true;
    std::thread([this] { work(); }).detach();
  }
  static thread_local const DrainAtThreadEnd drain_at_end;
  static_cast<void>(drain_at_end);
  ++pending;
  tasks_.push_back({std::move(name), std::move(run), delayed ? delay() : 0});
  added_.notify_one();
  const uint64_t ticket = ++enqueued_;
  lock.unlock();
  if (is_early_) wait(ticket);
  return ticket;
}

uint64_t StreamQueue::last_ticket() {
  const std::lock_guard lock(mutex_);
  return enqueued_;
}

bool StreamQueue::finished(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  return finished_ >= ticket;
}

bool StreamQueue::poll(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  const bool is_finished = finished_ >= ticket;
  wanted_ = std::max(wanted_, ticket);
  added_.notify_one();
  return is_finished;
}

void StreamQueue::wait(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  wanted_ = std::max(wanted_, ticket);
  added_.notify_one();
  done_.wait(lock, [&] { return finished_ >= ticket; });
}

void StreamQueue::wake() {
  const std::lock_guard lock(mutex_);
  added_.notify_one();
}

bool StreamQueue::may_run() const { return !tasks_.empty() && (!is_late || wanted_ > finished_); }

unsigned StreamQueue::delay() const {
  const unsigned most = delay_us;
  if (most == 0) return 0;
  std::mt19937_64 random(delay_seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(id_) * 1000003u + enqueued_ * 65537u +
                         static_cast<uint64_t>(device_));
  return static_cast<unsigned>(random() % (most + uint64_t{1}));
}

void StreamQueue::work() {
  use_one_thread();
  const c10::ParallelGuard serial(true);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      added_.wait(lock, [&] { return may_run(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (task.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(task.delay_us));
    try {
      task.run();
    } catch (const std::exception& e) {
      const std::lock_guard lock(registry().mutex);
      if (registry().error.empty()) registry().error = task.name + ": " + e.what();
    }
    task.run = nullptr;  // releases what the task holds before the task counts as finished
    {
      const std::lock_guard lock(mutex_);
      ++finished_;
    }
    --pending;
    done_.notify_all();
  }
}

StreamQueue& stream_queue(const c10::Stream& stream) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  auto& queues = r.queues.at(static_cast<std::size_t>(checked(stream.device_index())));
  return *queues.at(static_cast<std::size_t>(stream.id()));
}

std::vector<StreamQueue*> queues_of(c10::DeviceIndex device) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::vector<StreamQueue*> all;
  for (auto& queue : r.queues.at(static_cast<std::size_t>(checked(device)))) all.push_back(queue.get());
  return all;
}

c10::DeviceIndex current_device() noexcept { return this_device; }
void set_current_device(c10::DeviceIndex device) { this_device = checked(device); }

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = this_device;
  checked(device);
  const auto index = static_cast<std::size_t>(device);
  const c10::StreamId id = index < this_streams.size() ? this_streams[index] : 0;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

StreamQueue& current_queue(c10::DeviceIndex device) { return stream_queue(current_stream(device)); }

c10::Stream exchange_stream(const c10::Stream& stream) {
  const c10::Stream before = current_stream(stream.device_index());
  this_streams.resize(static_cast<std::size_t>(device_count()), 0);
  this_streams[static_cast<std::size_t>(stream.device_index())] = stream.id();
  return before;
}

c10::Stream pool_stream(c10::DeviceIndex device) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const c10::StreamId id = 1 + r.next_pool.at(static_cast<std::size_t>(checked(device)))++ % kPoolStreams;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

c10::Stream new_stream(c10::DeviceIndex device) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  auto& queues = r.queues.at(static_cast<std::size_t>(checked(device)));
  queues.push_back(std::make_unique<StreamQueue>(device, static_cast<c10::StreamId>(queues.size())));
  return queues.back()->handle();
}

void synchronize(StreamQueue& queue, uint64_t ticket) {
  ++synchronizations;
  queue.wait(ticket);
  rethrow_error();
}

void synchronize(StreamQueue& queue) { synchronize(queue, queue.last_ticket()); }

void synchronize_device(c10::DeviceIndex device) {
  ++synchronizations;
  for (StreamQueue* queue : queues_of(device)) queue->wait(queue->last_ticket());
  rethrow_error();
}

}  // namespace zr::test::sim

extern "C" {
// The number of tasks that are enqueued and not finished.
uint64_t zr_sim_pending() { return zr::test::sim::pending; }
// The number of waits of the host: streams, events, devices, blocking copies, item().
uint64_t zr_sim_synchronizations() { return zr::test::sim::synchronizations; }
// Runs run(context) on the stream that native_stream() of a libtorch stream names.
void zr_sim_enqueue(void* native_stream, const char* name, void (*run)(void*), void* context) {
  static_cast<zr::test::sim::StreamQueue*>(native_stream)->enqueue(name, [run, context] { run(context); });
}
// Waits for the stream, and throws nothing.
void zr_sim_wait(void* native_stream) {
  auto& queue = *static_cast<zr::test::sim::StreamQueue*>(native_stream);
  queue.wait(queue.last_ticket());
}
// 1 if the stream has done all its work.
int zr_sim_idle(void* native_stream) {
  auto& queue = *static_cast<zr::test::sim::StreamQueue*>(native_stream);
  return queue.poll(queue.last_ticket());
}
// The native handle of a stream; 0 is the default stream of the device.
void* zr_sim_stream(int device, int id) {
  const c10::Device sim(zr::test::sim::kSim, static_cast<c10::DeviceIndex>(device));
  return &zr::test::sim::stream_queue(c10::Stream(c10::Stream::UNSAFE, sim, id));
}
void* zr_sim_backing(const void* device_address) { return zr::test::sim::backing(device_address); }
// As ZR_SIM_LATE; with 0, streams run the tasks that they have held back.
void zr_sim_set_late(int late) {
  namespace sim = zr::test::sim;
  sim::is_late = late != 0;
  for (c10::DeviceIndex device = 0; device < sim::device_count(); ++device)
    for (sim::StreamQueue* const queue : sim::queues_of(device)) queue->wake();
}
// As ZR_SIM_SEED and ZR_SIM_DELAY_US, for tasks that are enqueued from now on.
void zr_sim_set_delay(uint64_t seed, unsigned max_us) {
  zr::test::sim::delay_seed = seed;
  zr::test::sim::delay_us = max_us;
}
}
