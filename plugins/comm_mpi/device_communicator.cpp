#include "device_communicator.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
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
constexpr auto kIdleLimit = std::chrono::seconds(10);   // for streams after the last operation has ended

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
}  // namespace

// The copies of one operation's memory, in one block of host memory. An operation can use the block of an earlier one.
class DeviceCommunicator::Passage final : public Gate {
 public:
  Passage(const zr::Host& host, nccl::GpuDevice& device, int64_t bytes)
      : host_(host),
        device_(device),
        bytes_(bytes),
        memory_(static_cast<char*>(device.allocate_host(bytes))),
        arrived_(device.make_mark()),
        left_(device.make_mark()) {
    account(bytes_);
  }
  // Memory that a stream may still use stays allocated.
  ~Passage() override {
    if (!is_idle()) return;
    device_.free_host(memory_);
    account(-bytes_);
  }
  Passage(const Passage&) = delete;

  int64_t bytes() const { return bytes_; }
  // True if neither MPI nor a stream uses the block.
  bool is_idle() noexcept {
    try {
      return has_ended() && left_->is_reached();
    } catch (const std::exception&) {  // the device has failed
      return false;
    }
  }
  bool has_ended() {
    const std::lock_guard lock(mutex_);
    return state_ != State::used;
  }
  bool has_failed() {
    const std::lock_guard lock(mutex_);
    return state_ == State::failed;
  }

  // The operation on the copies, in the block. The stream copies what the operation reads.
  zr_coll begin(const zr::CollectiveParts& operation, void* stream) {
    state_ = State::used;
    result_ = {};
    zr_coll coll = operation.coll;
    const int64_t distance = distance_of(operation);
    char* const src = memory_ + std::max<int64_t>(-distance, 0);
    char* const dst = memory_ + std::max<int64_t>(distance, 0);
    if (operation.receives(operation.rank)) {
      result_ = {static_cast<char*>(coll.dst.data), dst, operation.dst_bytes()};
      if (coll.flags & ZR_COLL_ACCUMULATE) copy(dst, result_.to, result_.bytes, stream);
      coll.dst.data = dst;
    }
    if (operation.sends(operation.rank)) {
      copy(src, static_cast<const char*>(coll.src.data), operation.src_bytes(), stream);
      coll.src.data = src;
    }
    arrived_->record(stream);
    coll.src.device = coll.dst.device = {ZR_DEVICE_CPU, 0};
    coll.counts = operation.counts.empty() ? nullptr : operation.counts.data();
    coll.recv_counts = coll.op == ZR_ALL_TO_ALL ? operation.recv_counts.data() : nullptr;
    coll.label = operation.label.c_str();
    return coll;
  }
  // In place of end(), for an operation that could not be submitted.
  void cancel(void* stream) {
    left_->record(stream);
    close(false);
  }
  // The stream waits for the end of the operation, and copies its results.
  void end(const std::shared_ptr<Passage>& self, void* stream) {
    auto context = std::make_unique<std::shared_ptr<Passage>>(self);
    device_.call(
        [](void* kept) {
          const std::unique_ptr<std::shared_ptr<Passage>> own(static_cast<std::shared_ptr<Passage>*>(kept));
          (*own)->wait();
        },
        context.get(), stream);
    context.release();
    copy(result_.to, result_.from, result_.bytes, stream);
    left_->record(stream);
  }

  bool is_open() override { return arrived_->is_reached(); }
  void close(bool is_complete) noexcept override {
    const std::lock_guard lock(mutex_);
    if (state_ == State::used) state_ = is_complete ? State::complete : State::failed;
    changed_.notify_all();
  }

  // Bytes of the block that an operation needs.
  static int64_t bytes_of(const zr::CollectiveParts& operation) {
    const int64_t distance = distance_of(operation);
    return std::max(std::max<int64_t>(-distance, 0) + operation.src_bytes(),
                    std::max<int64_t>(distance, 0) + operation.dst_bytes());
  }

 private:
  enum class State { used, complete, failed };
  struct Copy {
    char* to = nullptr;
    const char* from = nullptr;
    int64_t bytes = 0;
  };

  // Of the copy of dst from the copy of src, in bytes: as on the device if these overlap.
  static int64_t distance_of(const zr::CollectiveParts& operation) {
    if (operation.in_place)
      return static_cast<const char*>(operation.coll.dst.data) - static_cast<const char*>(operation.coll.src.data);
    return zr::round_up(operation.src_bytes(), kAlign);
  }
  void copy(char* to, const char* from, int64_t bytes, void* stream) {
    if (bytes > 0) device_.copy(to, from, bytes, stream);
  }
  void account(int64_t bytes) { host_.need<zr_memory_service>().account(host_.abi(), kTag, bytes); }
  // On a thread of the device.
  void wait() noexcept {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return state_ != State::used; });
  }

  const zr::Host host_;
  nccl::GpuDevice& device_;
  const int64_t bytes_;
  char* const memory_;
  const std::unique_ptr<nccl::Mark> arrived_, left_;
  Copy result_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  State state_ = State::complete;
};

DeviceCommunicator::DeviceCommunicator(const zr::Host& host, const zr_comm_open& open, MpiThread* thread,
                                       const MpiOptions& options)
    : host_(host), device_id_(open.device), device_(nccl::open_device(open.device.id)) {
  zr_comm_open on_host = open;
  on_host.device = {ZR_DEVICE_CPU, 0};
  host_memory_ = std::make_unique<MpiCommunicator>(host_, on_host, thread, options);
}

DeviceCommunicator::~DeviceCommunicator() { close_orderly(); }

bool DeviceCommunicator::all_of_passages(bool (*holds)(Passage&)) const {
  return std::all_of(passages_.begin(), passages_.end(), [&](const auto& passage) { return holds(*passage); });
}

// The operations in progress end if they can; then the streams continue.
void DeviceCommunicator::close_orderly() noexcept {
  try {
    wait_until(kCloseLimit, [&] {
      host_memory_->progress();
      return all_of_passages([](Passage& passage) { return passage.has_ended(); });
    });
  } catch (const std::exception&) {  // a peer has failed
  }
  host_memory_.reset();  // its operations fail
  wait_until(kIdleLimit, [&] { return all_of_passages([](Passage& passage) { return passage.is_idle(); }); });
  passages_.clear();
}

void DeviceCommunicator::abort() noexcept { host_memory_->abort(); }

void DeviceCommunicator::progress() { host_memory_->progress(); }

void DeviceCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  zr::CollectiveParts operation;
  operation.assign(coll, host_memory_->rank(), host_memory_->world());
  if (!stream)
    throw zr::PluginError(ZR_INVALID, operation.what() + ": memory of a device needs the stream of the call");
  if (operation.is_message())
    throw zr::PluginError(ZR_UNSUPPORTED,
                          operation.what() + ": communicator 'mpi' has no messages between devices; use a collective");
  void* const native = zr::native_stream(host_, stream);
  // With a second one, the functions of the device's driver could wait for each other: it may call one at a time.
  if (only_stream_.value_or(native) != native)
    throw zr::PluginError(ZR_UNSUPPORTED, operation.what() + ": communicator 'mpi' has one stream per device");
  only_stream_ = native;
  std::shared_ptr<Passage> passage;
  if (operation.world == 1) {
    copy_own_part(operation, native);
  } else {
    host_memory_->progress();  // throws an earlier failure
    passage = passage_of(Passage::bytes_of(operation));
    const zr_coll on_host = passage->begin(operation, native);
    try {
      host_memory_->submit_through(passage, on_host);
    } catch (...) {
      passage->cancel(native);
      throw;
    }
    passage->end(passage, native);
  }
  if (done) resolve_on_stream(done, passage, native);
}

void DeviceCommunicator::copy_own_part(const zr::CollectiveParts& operation, void* stream) {
  const zr_coll& coll = operation.coll;
  if (!operation.sends(0) || !operation.receives(0) || coll.src.data == coll.dst.data || coll.dst.count == 0) return;
  if (coll.src.dtype != coll.dst.dtype || (coll.flags & ZR_COLL_ACCUMULATE)) {
    const void* const source = coll.src.data;
    const bool accumulates = (coll.flags & ZR_COLL_ACCUMULATE) != 0;
    return device_->reduce({coll.reduce, accumulates, coll.src.dtype, coll.dst.dtype}, &source, 1, coll.dst.data,
                           coll.dst.count, stream);
  }
  device_->copy(coll.dst.data, coll.src.data, operation.dst_bytes(), stream);
}

// The smallest idle block that is large enough, or a new one instead of the idle ones that are too small.
std::shared_ptr<DeviceCommunicator::Passage> DeviceCommunicator::passage_of(int64_t bytes) {
  bytes = std::max<int64_t>(zr::round_up(bytes, kAlign), kAlign);
  std::shared_ptr<Passage> best;
  for (const auto& passage : passages_)
    if (passage->bytes() >= bytes && (!best || passage->bytes() < best->bytes()) && passage->is_idle()) best = passage;
  if (best) return best;
  passages_.erase(
      std::remove_if(passages_.begin(), passages_.end(), [](const auto& passage) { return passage->is_idle(); }),
      passages_.end());
  return passages_.emplace_back(std::make_shared<Passage>(host_, *device_, bytes));
}

struct DeviceCommunicator::Resolution {
  zr::Done done;
  std::shared_ptr<Passage> passage;  // null: the operation needed none
};

void DeviceCommunicator::resolve_on_stream(zr_done* done, std::shared_ptr<Passage> passage, void* stream) {
  auto context = std::make_unique<Resolution>(Resolution{zr::Done::retained(host_, done), std::move(passage)});
  device_->call(
      [](void* kept) {
        const std::unique_ptr<Resolution> own(static_cast<Resolution*>(kept));
        const bool has_failed = own->passage && own->passage->has_failed();
        own->done.resolve(has_failed ? ZR_COMM : ZR_OK, 0, has_failed ? "communicator \"mpi\" has failed" : nullptr);
      },
      context.get(), stream);
  context.release();
}

zr_view DeviceCommunicator::mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
  if (flags != 0)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "communicator 'mpi' does not support memory with flags " + std::to_string(flags));
  if (align > kAlign)
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'mpi' cannot align memory of a device to " +
                                              std::to_string(align) + " bytes; the limit is " + std::to_string(kAlign));
  void* const memory = device_->allocate(static_cast<int64_t>(std::max<uint64_t>(bytes, 1)));
  try {
    wait_until_zero(memory, bytes);
  } catch (...) {
    device_->free(memory);
    throw;
  }
  return {memory, static_cast<int64_t>(bytes), ZR_U8, 0, device_id_};
}

void DeviceCommunicator::wait_until_zero(void* memory, uint64_t bytes) {
  const std::unique_ptr<void, std::function<void(void*)>> zeros(device_->allocate_host(static_cast<int64_t>(kZeros)),
                                                                [&](void* block) { device_->free_host(block); });
  std::memset(zeros.get(), 0, kZeros);
  void* const stream = device_->create_stream();
  const std::unique_ptr<nccl::Mark> end = device_->make_mark();
  for (uint64_t at = 0; at < bytes; at += kZeros)
    device_->copy(static_cast<char*>(memory) + at, zeros.get(), static_cast<int64_t>(std::min(kZeros, bytes - at)),
                  stream);
  end->record(stream);
  while (!end->is_reached()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  device_->destroy_stream(stream);
}

void DeviceCommunicator::mem_free(const zr_view& memory) noexcept { device_->free(memory.data); }

HostOrDevice::HostOrDevice(const zr::Host& host, const zr_comm_open& open, MpiThread* thread,
                           const MpiOptions& options) {
  if (open.device.type == ZR_DEVICE_CPU)
    host_ = std::make_unique<MpiCommunicator>(host, open, thread, options);
  else
    device_ = std::make_unique<DeviceCommunicator>(host, open, thread, options);
}

void HostOrDevice::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  host_ ? host_->submit(coll, stream, done) : device_->submit(coll, stream, done);
}

void HostOrDevice::progress() { host_ ? host_->progress() : device_->progress(); }

zr_view HostOrDevice::mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
  return host_ ? host_->mem_alloc(bytes, align, flags) : device_->mem_alloc(bytes, align, flags);
}

void HostOrDevice::mem_free(const zr_view& memory) noexcept {
  host_ ? host_->mem_free(memory) : device_->mem_free(memory);
}

void HostOrDevice::shared_alloc(uint64_t bytes, void** writer, const void** reader) {
  if (!host_) throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'mpi' shares weights in host memory only");
  host_->shared_alloc(bytes, writer, reader);
}

void HostOrDevice::shared_free(void* writer) noexcept {
  if (host_) host_->shared_free(writer);
}

void HostOrDevice::abort() noexcept { host_ ? host_->abort() : device_->abort(); }

}  // namespace mpi
