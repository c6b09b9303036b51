// PeerDevice for the simulated device. Other processes map the file of its memory; events are counters in a file of
// their own. A stream that waits for a peer's event is a task that does not end before.
//
// ZR_SIM_DEFECT plants a defect, to show that tests find it: "wait" (a stream does not wait for the peers' sources),
// "reuse" (it does not wait until peers have read its own), "early" (the end is recorded before the work), "stream"
// (work goes to another stream), "host" (the host reads memory of the device). "failure": copies fail on rank 1.
// "sealed": memory of peers cannot be opened; "alone": no memory can be shared. "endless": as with CUDA, abort() does
// not end waits for peers, and memory is freed and closed after the device's last task only.
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../sim_device/device_calls.hpp"
#include "kernel.hpp"
#include "peer_device.hpp"

namespace peer {

namespace {

using sim::enqueue;
using sim::function_of_device;

bool has_defect(const char* name) {
  static const char* const planted = std::getenv("ZR_SIM_DEFECT");
  return planted && !std::strcmp(planted, name);
}

// A range of a file without a name of a process.
struct Range {
  int64_t pid;
  int64_t file;
  uint64_t offset, bytes;
};
Handle handle_of(const Range& range) {
  Handle handle{};
  static_assert(sizeof range <= sizeof handle.bytes, "a range fits");
  std::memcpy(handle.bytes, &range, sizeof range);
  return handle;
}

void* map(const Handle& handle, uint64_t* bytes) {
  Range range;
  std::memcpy(&range, handle.bytes, sizeof range);
  const std::string path = "/proc/" + std::to_string(range.pid) + "/fd/" + std::to_string(range.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* const memory = file < 0 ? MAP_FAILED
                                : ::mmap(nullptr, range.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                                         static_cast<off_t>(range.offset));
  if (file >= 0) ::close(file);
  if (memory == MAP_FAILED) throw zr::PluginError(ZR_COMM, "cannot map " + path, errno);
  *bytes = range.bytes;
  return memory;
}

constexpr uint64_t kPage = 4096;
using Counters = std::array<std::atomic<uint64_t>, 2>;  // by event: how often it was recorded

class SimDevice final : public PeerDevice {
 public:
  SimDevice(int number, int rank, int world)
      : number_(number),
        rank_(rank),
        reduce_(ZR_CHOOSE(reduce_ranks)),
        peers_(static_cast<size_t>(world)),
        peer_pids_(static_cast<size_t>(world)) {
    file_ = ::memfd_create("zr_sim_events", MFD_CLOEXEC);
    if (file_ < 0 || ::ftruncate(file_, kPage) != 0) throw zr::PluginError(ZR_IO, "memfd_create failed", errno);
    uint64_t bytes = 0;
    peers_[static_cast<size_t>(rank)] = static_cast<Counters*>(map(event(Event::ready), &bytes));
  }
  ~SimDevice() override {
    if (!has_reached_mark()) return;  // tasks of the stream use the events
    for (Counters* counters : peers_)
      if (counters) ::munmap(counters, kPage);
    ::close(file_);
  }

  void* allocate(uint64_t bytes, Handle* handle) override {
    bytes = (bytes + kPage - 1) / kPage * kPage + kPage;  // so that the range of the file can begin at a page
    void* const block = function_of_device<void*(int, uint64_t)>("zr_sim_allocate")(number_, bytes);
    if (!block)
      throw zr::PluginError(ZR_NOMEM,
                            "the simulated device has no " + std::to_string(bytes) + " bytes; see ZR_SIM_BYTES");
    const uint64_t offset = offset_of(block);
    const uint64_t at_page = (offset + kPage - 1) / kPage * kPage;
    char* const memory = static_cast<char*>(block) + (at_page - offset);
    blocks_[memory] = block;
    const int64_t file = function_of_device<int()>("zr_sim_file")();
    *handle = handle_of({::getpid(), file, at_page, bytes - kPage});
    return memory;
  }
  void free(void* memory) noexcept override {
    wait_for_device();
    const auto at = blocks_.find(memory);
    if (at == blocks_.end()) return;
    function_of_device<void(void*)>("zr_sim_free")(at->second);
    blocks_.erase(at);
  }
  void* open(const Handle& memory) override {
    if (has_defect("sealed")) throw zr::PluginError(ZR_IO, "a sealed container", EACCES);
    uint64_t bytes = 0;
    char* const opened = static_cast<char*>(map(memory, &bytes));
    const std::lock_guard lock(mutex_);
    opened_[opened] = bytes;
    return opened;
  }
  void close(void* opened) noexcept override {
    wait_for_device();
    const std::lock_guard lock(mutex_);
    const auto at = opened_.find(static_cast<char*>(opened));
    if (at == opened_.end()) return;
    ::munmap(opened, at->second);
    opened_.erase(at);
  }

  Handle event(Event) override { return handle_of({::getpid(), file_, 0, kPage}); }  // both are in one page
  void open_event(int rank, Event event, const Handle& handle) override {
    if (event == Event::finished) return;
    uint64_t bytes = 0;
    peers_[static_cast<size_t>(rank)] = static_cast<Counters*>(map(handle, &bytes));
    Range range;
    std::memcpy(&range, handle.bytes, sizeof range);
    peer_pids_[static_cast<size_t>(rank)] = static_cast<pid_t>(range.pid);
  }
  void close_events() noexcept override {}  // the destructor does: tasks of a stream that was aborted may read them
  void record(Event event, void* stream) override {
    const size_t which = static_cast<size_t>(event);
    const uint64_t number = ++recorded_[which];
    Counters* const counters = peers_[static_cast<size_t>(rank_)];
    if (event == Event::finished && has_defect("early")) return (*counters)[which].store(number);
    enqueue(stream, "record",
            [counters, which, number] { (*counters)[which].store(number, std::memory_order_release); });
  }
  // All ranks record equally often, so the peer's last record before this call has the number of this rank's.
  void wait(int rank, Event event, void* stream) override {
    if (event == Event::ready && has_defect("wait")) return;
    if (event == Event::finished && has_defect("reuse")) return;
    const size_t which = static_cast<size_t>(event);
    const uint64_t number = recorded_[which];
    const Counters* const counters = peers_[static_cast<size_t>(rank)];
    const pid_t pid = peer_pids_[static_cast<size_t>(rank)];
    enqueue(stream, "wait for a peer", [aborted = aborted_, counters, which, number, pid] {
      for (uint64_t spins = 0; (*counters)[which].load(std::memory_order_acquire) < number && !*aborted; ++spins) {
        ::sched_yield();
        if (spins % 1024 == 1023 && !has_defect("endless") && ::kill(pid, 0) != 0 && errno == ESRCH) return;
      }
    });
  }

  void copy(void* to, const void* from, int64_t bytes, void* stream) override {
    char* const host_to = address(to);
    const char* const host_from = address(from);
    if (has_defect("failure") && rank_ == 1) throw zr::PluginError(ZR_IO, "a planted failure");
    if (has_defect("host")) static_cast<void>(*static_cast<const volatile char*>(to));
    enqueue(work_stream(stream), "copy", [=] { std::memcpy(host_to, host_from, static_cast<size_t>(bytes)); });
  }
  void reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* const* outs, int n_outs,
              int64_t first, int64_t count, void* stream) override {
    std::vector<const void*> from;
    std::vector<void*> to;
    for (int i = 0; i < n; ++i) from.push_back(address(sources[i]));
    for (int i = 0; i < n_outs; ++i) to.push_back(address(outs[i]));
    enqueue(work_stream(stream), "reduce",
            [=, reduce = reduce_] { reduce(kind, from.data(), n, to.data(), n_outs, first, count, false); });
  }
  void call(void (*fn)(void*), void* context, void* stream) override {
    enqueue(stream, "call", [=] { fn(context); });
  }
  void set_mark(void* stream) override {
    const uint64_t number = ++marks_;
    enqueue(stream, "mark", [reached = reached_, number] { *reached = number; });
  }
  bool mark_is_reached() noexcept override { return has_reached_mark(); }
  void abort() noexcept override { *aborted_ = !has_defect("endless"); }

 private:
  bool has_reached_mark() const noexcept { return *reached_ == marks_; }
  void wait_for_device() const noexcept {
    if (!has_defect("endless")) return;
    while (!has_reached_mark()) ::sched_yield();
  }
  static uint64_t offset_of(const void* memory) {
    return function_of_device<uint64_t(const void*)>("zr_sim_offset")(memory);
  }
  // Where a task finds memory of this rank's device, or of a peer's, which is mapped.
  template <class T>
  char* address(T* memory) {
    char* const at = const_cast<char*>(static_cast<const char*>(memory));
    {
      const std::lock_guard lock(mutex_);
      auto next = opened_.upper_bound(at);
      if (next != opened_.begin() && at < std::prev(next)->first + std::prev(next)->second) return at;
    }
    return static_cast<char*>(function_of_device<void*(const void*)>("zr_sim_backing")(memory));
  }
  void* work_stream(void* stream) const {
    return has_defect("stream") ? function_of_device<void*(int, int)>("zr_sim_stream")(number_, 1) : stream;
  }

  const int number_, rank_;
  decltype(ZR_CHOOSE(reduce_ranks)) const reduce_;
  int file_ = -1;
  std::vector<Counters*> peers_;  // by rank; also this rank's own
  std::vector<pid_t> peer_pids_;
  std::array<uint64_t, 2> recorded_{};
  uint64_t marks_ = 0;
  const std::shared_ptr<std::atomic<uint64_t>> reached_ = std::make_shared<std::atomic<uint64_t>>(0);
  std::map<void*, void*> blocks_;  // by address: the allocation that contains it
  std::mutex mutex_;
  std::map<char*, uint64_t> opened_;  // bytes of memory of peers
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

bool can_share_memory() noexcept { return ::dlsym(RTLD_DEFAULT, "zr_sim_file") != nullptr && !has_defect("alone"); }

std::unique_ptr<PeerDevice> open_device(int32_t number, int rank, int world) {
  return std::make_unique<SimDevice>(number, rank, world);
}

}  // namespace peer
