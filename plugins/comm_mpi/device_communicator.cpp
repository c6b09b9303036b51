#include "device_communicator.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "zr/round_up.hpp"

namespace mpi {

namespace {
constexpr const char* kTag = "MPI: copies of memory of the device";
constexpr int64_t kAlign = 256;                         // of the copies
constexpr uint64_t kZeros = uint64_t{1} << 20;          // bytes that are zeroed at a time
constexpr auto kCloseLimit = std::chrono::seconds(60);  // for operations in progress
constexpr auto kIdleLimit = std::chrono::seconds(10);   // for the stream after MPI has ended them

// Returns whether `condition` became true in time. It may throw.
template <class Condition>
bool wait_until(std::chrono::seconds limit, const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

int64_t bytes_read(const zr::CollectiveParts& operation) {
  return operation.sends(operation.rank) ? operation.src_bytes() : 0;
}
int64_t bytes_written(const zr::CollectiveParts& operation) {
  return operation.receives(operation.rank) ? operation.dst_bytes() : 0;
}

// From the copy of src to that of dst, in bytes: as on the device if these overlap.
int64_t distance_of(const zr::CollectiveParts& operation) {
  if (!operation.in_place) return zr::round_up(bytes_read(operation), kAlign);
  return static_cast<const char*>(operation.coll.dst.data) - static_cast<const char*>(operation.coll.src.data);
}

// Bytes of both copies.
int64_t bytes_of_copies(const zr::CollectiveParts& operation) {
  const int64_t distance = distance_of(operation);
  return std::max(std::max<int64_t>(-distance, 0) + bytes_read(operation),
                  std::max<int64_t>(distance, 0) + bytes_written(operation));
}
}  // namespace

// One operation, between the stream and the MPI thread. It uses neither the device nor the communicator, so any thread
// may destroy it.
class DeviceCommunicator::Passage final : public Gate {
 public:
  explicit Passage(MpiThread* thread) : thread_(thread) {}

  bool is_open() noexcept override { return is_open_; }
  void close(zr_code code) noexcept override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      code_ = code;
    }
    changed_.notify_all();
  }
  // The stream has copied the source; waits until MPI has ended the operation. On a thread of the device's driver.
  void open_and_wait() noexcept {
    is_open_ = true;
    std::unique_lock<std::mutex> lock(mutex_);
    if (code_) return;  // the MPI thread may have ended
    thread_->wake();
    while (!changed_.wait_for(lock, std::chrono::milliseconds(1), [&] { return code_.has_value(); })) thread_->hurry();
  }
  // ZR_OK, or why it never will be; empty: it is in progress.
  std::optional<zr_code> code() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return code_;
  }

 private:
  MpiThread* const thread_;
  std::atomic<bool> is_open_{false};
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<zr_code> code_;
};

// Host memory for the copies of one operation at a time.
class DeviceCommunicator::Block {
 public:
  Block(const zr::Host& host, nccl::GpuDevice& device, int64_t bytes)
      : host_(host),
        device_(device),
        bytes_(bytes),
        memory_(static_cast<char*>(device.allocate_host(bytes))),
        left_(device.make_mark()) {
    account(bytes_);
  }
  // Memory that MPI or a stream may still use stays allocated.
  ~Block() {
    if (!is_idle()) return;
    device_.free_host(memory_);
    account(-bytes_);
  }
  Block(const Block&) = delete;

  int64_t bytes() const { return bytes_; }
  // True if neither MPI nor the stream uses the block.
  bool is_idle() noexcept {
    try {
      return !is_broken_ && left_->is_reached() && (!passage_ || passage_->code().has_value());
    } catch (const std::exception&) {  // the device has failed
      return false;
    }
  }

  // Returns the operation on the copies. The stream copies what the operation reads.
  zr_coll copy_source(const zr::CollectiveParts& operation, std::shared_ptr<Passage> passage, void* stream) {
    is_broken_ = true;  // until copy_result() has been called
    passage_ = std::move(passage);
    zr_coll coll = operation.coll;
    const int64_t distance = distance_of(operation);
    char* const src = memory_ + std::max<int64_t>(-distance, 0);
    char* const dst = memory_ + std::max<int64_t>(distance, 0);
    to_ = static_cast<char*>(coll.dst.data);
    result_ = dst;
    result_bytes_ = bytes_written(operation);
    if (coll.flags & ZR_COLL_ACCUMULATE) copy(dst, to_, result_bytes_, stream);
    copy(src, static_cast<const char*>(coll.src.data), bytes_read(operation), stream);
    coll.src.data = src;
    coll.dst.data = dst;
    coll.src.device = coll.dst.device = {ZR_DEVICE_CPU, 0};
    coll.counts = operation.counts.empty() ? nullptr : operation.counts.data();
    coll.recv_counts = coll.op == ZR_ALL_TO_ALL ? operation.recv_counts.data() : nullptr;
    coll.label = operation.label.c_str();
    return coll;
  }
  void copy_result(void* stream) {
    copy(to_, result_, result_bytes_, stream);
    leave(stream);
  }
  // In place of copy_result(), for an operation that has not been started.
  void cancel(void* stream) {
    passage_ = nullptr;
    leave(stream);
  }

 private:
  void leave(void* stream) {
    left_->record(stream);
    is_broken_ = false;
  }
  void copy(char* to, const char* from, int64_t bytes, void* stream) {
    if (bytes > 0) device_.copy(to, from, bytes, stream);
  }
  void account(int64_t bytes) { host_.need<zr_memory_service>().account(host_.abi(), kTag, bytes); }

  const zr::Host host_;
  nccl::GpuDevice& device_;
  const int64_t bytes_;
  char* const memory_;
  const std::unique_ptr<nccl::Mark> left_;  // the stream has copied the result
  std::shared_ptr<Passage> passage_;        // of the last operation
  char *to_ = nullptr, *result_ = nullptr;
  int64_t result_bytes_ = 0;
  bool is_broken_ = false;  // it is not known when the stream ends to use the block
};

// A completion, which the stream resolves, or the end of the communicator.
struct DeviceCommunicator::Completion {
  zr::Done done;
  std::shared_ptr<Passage> passage;  // null: of one rank
  std::atomic<bool> is_resolved{false};
  void resolve(zr_code code, const char* text) {
    if (!is_resolved.exchange(true)) done.resolve(code, 0, text);
  }
};

DeviceCommunicator::DeviceCommunicator(const zr::Host& host, const zr_comm_open& open, MpiThread* thread,
                                       const MpiOptions& options)
    : host_(host),
      device_id_(open.device),
      thread_(thread),
      device_(nccl::open_device(open.device.id)),
      end_(device_->make_mark()) {
  zr_comm_open on_host = open;
  on_host.device = {ZR_DEVICE_CPU, 0};
  host_memory_ = std::make_unique<MpiCommunicator>(host_, on_host, thread, options);
}

DeviceCommunicator::~DeviceCommunicator() { close_orderly(); }

// The operations in progress end if they can; then the stream continues.
void DeviceCommunicator::close_orderly() noexcept {
  try {
    wait_until(kCloseLimit, [&] {
      host_memory_->progress();
      end_->is_reached();  // throws if the device has failed
      return std::all_of(started_.begin(), started_.end(), [](const auto& each) { return each->code().has_value(); });
    });
  } catch (const std::exception&) {  // a peer has failed, or this communicator was aborted
  }
  host_memory_.reset();  // its operations fail
  bool is_idle = false;
  try {
    is_idle = wait_until(kIdleLimit, [&] { return end_->is_reached(); });
    wait_until(kIdleLimit, [&] {
      return std::all_of(completions_.begin(), completions_.end(), [](const auto& c) { return c->is_resolved.load(); });
    });
  } catch (const std::exception&) {  // the device has failed
  }
  for (const auto& completion : completions_) completion->resolve(ZR_CANCELLED, "the communicator was closed");
  blocks_.clear();
  for (void* const memory : allocated_)
    if (is_idle) device_->free(memory);  // else the stream may still use it
}

void DeviceCommunicator::abort() noexcept { host_memory_->abort(); }

void DeviceCommunicator::progress() { host_memory_->progress(); }

// With a second stream, functions of the host could wait for each other: the driver may call one at a time.
void DeviceCommunicator::check_arguments(const zr::CollectiveParts& operation, bool has_stream, void* stream) const {
  if (!has_stream)
    throw zr::PluginError(ZR_INVALID, operation.what() + ": memory of a device needs the stream of the call");
  if (operation.is_message())
    throw zr::PluginError(ZR_UNSUPPORTED,
                          operation.what() + ": communicator 'mpi' has no messages between devices; use a collective");
  if (only_stream_.value_or(stream) != stream)
    throw zr::PluginError(ZR_UNSUPPORTED, operation.what() + ": communicator 'mpi' has one stream per device");
}

void DeviceCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  zr::CollectiveParts operation;
  operation.assign(coll, host_memory_->rank(), host_memory_->world());
  void* const native = stream ? zr::native_stream(host_, stream) : nullptr;
  check_arguments(operation, stream != nullptr, native);
  if (failure_) throw zr::PluginError(failure_->code, failure_->text);
  only_stream_ = native;
  host_memory_->progress();  // throws an earlier failure of MPI
  try {
    run(operation, done, native);
  } catch (const std::exception& error) {
    const auto* const known = dynamic_cast<const zr::PluginError*>(&error);
    if (known && known->code() == ZR_UNSUPPORTED) throw;  // nothing was started
    failure_ = Failure{known ? known->code() : zr_code{ZR_INTERNAL}, error.what()};
    host_memory_->abort();  // what is on the stream must not wait for ever
    throw;
  }
}

void DeviceCommunicator::run(const zr::CollectiveParts& operation, zr_done* done, void* stream) {
  std::shared_ptr<Passage> passage;
  if (operation.world == 1) {
    run_alone(operation, stream);
  } else {
    started_.erase(
        std::remove_if(started_.begin(), started_.end(), [](const auto& each) { return each->code().has_value(); }),
        started_.end());
    passage = std::make_shared<Passage>(thread_);
    Block& block = block_of(bytes_of_copies(operation));
    const zr_coll copied = block.copy_source(operation, passage, stream);
    try {
      host_memory_->submit_through(passage, copied);
    } catch (...) {
      block.cancel(stream);
      throw;
    }
    started_.push_back(passage);
    wait_in_stream(passage, stream);
    block.copy_result(stream);
  }
  end_->record(stream);
  if (done) resolve_in_stream(done, passage, stream);
}

void DeviceCommunicator::run_alone(const zr::CollectiveParts& operation, void* stream) {
  const zr_coll& coll = operation.coll;
  if (!operation.sends(0) || !operation.receives(0) || coll.dst.count == 0) return;
  const void* const source = coll.src.data;
  if (operation.is_reduction())
    return device_->reduce({coll.reduce, (coll.flags & ZR_COLL_ACCUMULATE) != 0, coll.src.dtype, coll.dst.dtype},
                           &source, 1, coll.dst.data, coll.dst.count, stream);
  if (source != coll.dst.data) device_->copy(coll.dst.data, source, operation.dst_bytes(), stream);
}

void DeviceCommunicator::wait_in_stream(const std::shared_ptr<Passage>& passage, void* stream) {
  auto kept = std::make_unique<std::shared_ptr<Passage>>(passage);
  device_->call(
      [](void* context) {
        const std::unique_ptr<std::shared_ptr<Passage>> own(static_cast<std::shared_ptr<Passage>*>(context));
        (*own)->open_and_wait();
      },
      kept.get(), stream);
  static_cast<void>(kept.release());  // the call deletes it
}

void DeviceCommunicator::resolve_in_stream(zr_done* done, const std::shared_ptr<Passage>& passage, void* stream) {
  completions_.erase(std::remove_if(completions_.begin(), completions_.end(),
                                    [](const auto& each) { return each->is_resolved.load(); }),
                     completions_.end());
  auto completion = std::make_shared<Completion>();
  completion->done = zr::Done::retained(host_, done);
  completion->passage = passage;
  completions_.push_back(completion);
  auto kept = std::make_unique<std::shared_ptr<Completion>>(completion);
  try {
    device_->call(
        [](void* context) {
          const std::unique_ptr<std::shared_ptr<Completion>> own(static_cast<std::shared_ptr<Completion>*>(context));
          Completion& completion = **own;
          const zr_code code = completion.passage ? completion.passage->code().value_or(ZR_INTERNAL) : zr_code{ZR_OK};
          completion.resolve(code,
                             code == ZR_OK ? nullptr : "communicator \"mpi\" has failed, or was closed or aborted");
        },
        kept.get(), stream);
  } catch (...) {
    completions_.pop_back();  // a call that fails does not resolve it
    throw;
  }
  static_cast<void>(kept.release());  // the call deletes it
}

// The smallest idle block that is large enough, or a new one. Blocks are freed only if all are idle, because the driver
// may wait for the device then.
DeviceCommunicator::Block& DeviceCommunicator::block_of(int64_t bytes) {
  bytes = std::max<int64_t>(zr::round_up(bytes, kAlign), kAlign);
  Block* best = nullptr;
  for (const auto& block : blocks_)
    if (block->bytes() >= bytes && (!best || block->bytes() < best->bytes()) && block->is_idle()) best = block.get();
  if (best) return *best;
  if (std::all_of(blocks_.begin(), blocks_.end(), [](const auto& block) { return block->is_idle(); }))
    blocks_.erase(std::remove_if(blocks_.begin(), blocks_.end(), [&](const auto& b) { return b->bytes() < bytes; }),
                  blocks_.end());
  blocks_.push_back(std::make_unique<Block>(host_, *device_, bytes));
  return *blocks_.back();
}

zr_view DeviceCommunicator::mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
  if (flags != 0)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "communicator 'mpi' does not support memory with flags " + std::to_string(flags));
  if (align > kAlign)
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'mpi' cannot align memory of a device to " +
                                              std::to_string(align) + " bytes; the limit is " + std::to_string(kAlign));
  void* const memory = device_->allocate(static_cast<int64_t>(std::max<uint64_t>(bytes, 1)));
  allocated_.insert(memory);
  wait_until_zero(memory, bytes);
  return {memory, static_cast<int64_t>(bytes), ZR_U8, 0, device_id_};
}

// If the device fails, what it may still use stays allocated.
void DeviceCommunicator::wait_until_zero(void* memory, uint64_t bytes) {
  void* const zeros = device_->allocate_host(static_cast<int64_t>(kZeros));
  std::memset(zeros, 0, kZeros);
  void* const stream = device_->create_stream();
  const std::unique_ptr<nccl::Mark> end = device_->make_mark();
  for (uint64_t at = 0; at < bytes; at += kZeros)
    device_->copy(static_cast<char*>(memory) + at, zeros, static_cast<int64_t>(std::min(kZeros, bytes - at)), stream);
  end->record(stream);
  while (!end->is_reached()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  device_->destroy_stream(stream);
  device_->free_host(zeros);
}

void DeviceCommunicator::mem_free(const zr_view& memory) noexcept {
  if (allocated_.erase(memory.data)) device_->free(memory.data);
}

}  // namespace mpi
