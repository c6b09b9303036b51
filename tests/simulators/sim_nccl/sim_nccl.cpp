// A library with NCCL's interface, as far as the communicator "nccl" uses it, whose operations are tasks on the streams
// of the simulated device. Ranks share a file in memory, which the unique id names, with one message per pair of ranks
// in transit; a receiver copies from the sender's memory of the device, whose file it maps.
//
// As NCCL does, calls that have to wait return ncclInProgress: the operations of a group reach the stream only in a
// later call of ncclCommGetAsyncError(). Two calls at a time on one communicator, and calls on one that does not exist
// any more, end the process.
//
// Environment: ZR_SIM_NCCL_VERSION: the version to report. ZR_SIM_NCCL_ERROR=n: group n of this process fails.
// ZR_SIM_NCCL_REGISTERED=1: a communicator that is closed without registered memory ends the process.
// ZR_SIM_NCCL_STUCK=1: this rank never gets connected. ZR_SIM_NCCL_KILLED=r: rank r is killed while the ranks connect.
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../sim_device/device_calls.hpp"
#include "nccl_abi.hpp"

namespace {

using nccl::Result;
using sim::function_of_device;

constexpr int kRanks = 16;

// From one rank to another; the message with the number `published` is at `offset` in the sender's memory.
struct Channel {
  std::atomic<uint64_t> published, consumed;
  uint64_t offset, bytes;
};
// Shared by all ranks; begins with zeros.
struct Page {
  std::atomic<int> is_attached[kRanks], is_connected[kRanks];
  int64_t pids[kRanks], files[kRanks];  // of the memory of the devices
  Channel channels[kRanks][kRanks];     // [from][to]
};

struct Message {
  int peer;
  char* data;  // address on the device
  uint64_t bytes;
  uint64_t number;
};
struct Group {
  std::vector<Message> sends, receives;
  void* copy_to = nullptr;  // from this rank to itself
  const void* copy_from = nullptr;
  uint64_t copy_bytes = 0;
  void* stream = nullptr;
};

[[noreturn]] void misuse(const char* text) {
  std::fprintf(stderr, "sim_nccl: %s\n", text);
  std::abort();
}

int number_in_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

// The memory of another process's file; null if that fails.
void* map_file(int64_t pid, int64_t file, uint64_t* bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) return nullptr;
  struct stat info {};
  ::fstat(opened, &info);
  *bytes = static_cast<uint64_t>(info.st_size);
  void* const memory = ::mmap(nullptr, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, opened, 0);
  ::close(opened);
  return memory == MAP_FAILED ? nullptr : memory;
}

uint64_t bytes_of_device_memory() {
  struct stat info {};
  ::fstat(function_of_device<int()>("zr_sim_file")(), &info);
  return static_cast<uint64_t>(info.st_size);
}

// What the tasks of a communicator use; it lives as long as they do.
struct State {
  Page* page = nullptr;
  int file = -1;  // of the page, if this process has made it
  int rank = 0, world = 0;
  char* memory[kRanks] = {};   // of the peers' devices
  int processes[kRanks] = {};  // of the peers, as file descriptors
  uint64_t memory_bytes[kRanks] = {};
  uint64_t sent[kRanks] = {}, received[kRanks] = {};
  std::atomic<int> tasks{0};
  std::atomic<bool> is_aborted{false};
  std::atomic<int> error{nccl::kSuccess};
  const char* error_text = "";

  ~State() {
    for (int r = 0; r < world; ++r) {
      if (memory[r]) ::munmap(memory[r], memory_bytes[r]);
      if (processes[r] > 0) ::close(processes[r]);
    }
    if (page) ::munmap(page, sizeof(Page));
    if (file >= 0) ::close(file);
  }

  void fail(Result result, const char* text) {
    error_text = text;
    error = result;
  }
  // True if the task has to end. If a peer has ended, it waits on, as NCCL's kernels do, until it is aborted.
  bool must_end(int peer) {
    ::sched_yield();
    pollfd end{processes[peer], POLLIN, 0};
    if (error == nccl::kSuccess && ::poll(&end, 1, 0) == 1) fail(nccl::kRemoteError, "a peer has ended");
    return is_aborted;
  }
  void run(const Group& group) {
    if (error != nccl::kSuccess) {  // its kernels wait until they are aborted
      while (!is_aborted) ::sched_yield();
      return;
    }
    for (const Message& message : group.sends) {
      Channel& channel = page->channels[rank][message.peer];
      while (channel.consumed.load(std::memory_order_acquire) + 1 < message.number)
        if (must_end(message.peer)) return;
      channel.offset = function_of_device<uint64_t(const void*)>("zr_sim_offset")(message.data);
      channel.bytes = message.bytes;
      channel.published.store(message.number, std::memory_order_release);
    }
    if (group.copy_bytes > 0)
      std::memmove(sim::backing(group.copy_to), sim::backing(group.copy_from), group.copy_bytes);
    for (const Message& message : group.receives) {
      Channel& channel = page->channels[message.peer][rank];
      while (channel.published.load(std::memory_order_acquire) < message.number)
        if (must_end(message.peer)) return;
      if (channel.bytes != message.bytes) fail(nccl::kInvalidUsage, "the sizes of a send and of its receive differ");
      if (error == nccl::kSuccess)
        std::memcpy(sim::backing(message.data), memory[message.peer] + channel.offset, message.bytes);
      channel.consumed.store(message.number, std::memory_order_release);
    }
    for (const Message& message : group.sends)
      while (page->channels[rank][message.peer].consumed.load(std::memory_order_acquire) < message.number)
        if (must_end(message.peer)) return;
  }
};

// Groups of this process, for ZR_SIM_NCCL_ERROR.
std::atomic<int> groups_started{0};

class Communicator {
 public:
  Communicator(const nccl::UniqueId& id, int rank, int world) : state_(std::make_shared<State>()) {
    int64_t name[2];
    std::memcpy(name, id.internal, sizeof name);
    uint64_t bytes = 0;
    state_->page = static_cast<Page*>(map_file(name[0], name[1], &bytes));
    if (name[0] == ::getpid()) state_->file = static_cast<int>(name[1]);
    state_->rank = rank;
    state_->world = world;
    if (!state_->page) return;
    if (rank == number_in_environment("ZR_SIM_NCCL_KILLED", -1)) ::raise(SIGKILL);
    state_->page->pids[rank] = ::getpid();
    state_->page->files[rank] = function_of_device<int()>("zr_sim_file")();
    if (!number_in_environment("ZR_SIM_NCCL_STUCK", 0)) state_->page->is_attached[rank].store(1);
  }
  int rank() const { return state_->rank; }
  int world() const { return state_->world; }
  bool is_valid() const { return state_->page != nullptr; }
  void abort() { state_->is_aborted = true; }
  const char* error_text() const { return state_->error_text; }
  void finalize() { is_finalizing_ = true; }

  int registered = 0, most_registered = 0;  // buffers

  Group& group() { return group_; }
  void copy_own(void* to, const void* from, uint64_t bytes) {
    group_.copy_to = to;
    group_.copy_from = from;
    group_.copy_bytes = to == from ? 0 : bytes;
  }
  // As the end of a group: the operations start later.
  Result launch() {
    if (launching_) misuse("a group began before the last one was launched");
    polls_ = 0;
    launching_ = true;
    return nccl::kInProgress;
  }
  Result state() {
    if (state_->error != nccl::kSuccess) return static_cast<Result>(state_->error.load());
    if (!is_connected_ && !connect()) return nccl::kInProgress;
    if (launching_) {
      if (++polls_ < 2) return nccl::kInProgress;
      launching_ = false;
      enqueue();
    }
    if (state_->error != nccl::kSuccess) return static_cast<Result>(state_->error.load());
    return is_finalizing_ && state_->tasks > 0 ? nccl::kInProgress : nccl::kSuccess;
  }
  bool is_ready() const { return is_connected_ && !launching_; }

 private:
  // True once all ranks have mapped each other's memory.
  bool connect() {
    const auto all = [&](const std::atomic<int>* flags) {
      for (int r = 0; r < state_->world; ++r)
        if (!flags[r].load()) return false;
      return true;
    };
    if (!all(state_->page->is_attached)) return false;
    if (!state_->page->is_connected[state_->rank].load()) map_peers();
    return is_connected_ = all(state_->page->is_connected);
  }
  void map_peers() {
    for (int r = 0; r < state_->world; ++r) {
      if (r == state_->rank) continue;
      state_->memory[r] =
          static_cast<char*>(map_file(state_->page->pids[r], state_->page->files[r], &state_->memory_bytes[r]));
      state_->processes[r] = static_cast<int>(::syscall(SYS_pidfd_open, state_->page->pids[r], 0));
      if (!state_->memory[r]) state_->fail(nccl::kRemoteError, "the memory of a peer cannot be mapped");
    }
    state_->page->is_connected[state_->rank].store(1);
  }
  void enqueue() {
    Group group = std::move(group_);
    group_ = Group();
    for (Message& message : group.sends) message.number = ++state_->sent[message.peer];
    for (Message& message : group.receives) message.number = ++state_->received[message.peer];
    if (++groups_started == number_in_environment("ZR_SIM_NCCL_ERROR", 0))
      state_->fail(nccl::kRemoteError, "planted by ZR_SIM_NCCL_ERROR");
    ++state_->tasks;
    sim::enqueue(group.stream, "nccl", [state = state_, group] {
      state->run(group);
      --state->tasks;
    });
  }

  const std::shared_ptr<State> state_;
  Group group_;
  int polls_ = 0;
  bool is_connected_ = false, launching_ = false, is_finalizing_ = false;
};

std::mutex registry_mutex;
std::set<Communicator*>& registry() {
  static auto* const all = new std::set<Communicator*>;
  return *all;
}

// One call of this library: on a communicator that exists, and one at a time.
class Call {
 public:
  explicit Call(nccl::Comm comm) : comm_(reinterpret_cast<Communicator*>(comm)) {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    if (!registry().count(comm_)) misuse("a call on a communicator that does not exist");
    if (calls().count(comm_)) misuse("two calls at a time on one communicator");
    calls().insert(comm_);
  }
  ~Call() {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    calls().erase(comm_);
  }
  Call(const Call&) = delete;
  Communicator* operator->() const { return comm_; }
  Communicator* get() const { return comm_; }

 private:
  static std::set<Communicator*>& calls() {
    static auto* const all = new std::set<Communicator*>;
    return *all;
  }
  Communicator* const comm_;
};

void remove(Communicator* comm) {
  {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    registry().erase(comm);
  }
  delete comm;
}

thread_local int group_depth = 0;
thread_local nccl::Comm group_comm = nullptr;

Result close(nccl::Comm comm, bool aborts) {
  Communicator* closed = nullptr;
  {
    const Call call(comm);
    if (aborts) call->abort();
    closed = call.get();
  }
  remove(closed);
  return nccl::kSuccess;
}

// Adds operations to the group of the thread.
template <class Add>
Result add(nccl::Comm comm, const void* memory, size_t bytes, void* stream, Add add_to) {
  const Call call(comm);
  if (group_depth == 0) misuse("an operation outside of a group, which this library does not offer");
  if (!call->is_ready()) misuse("an operation before the last one was launched");
  if (function_of_device<uint64_t(const void*)>("zr_sim_offset")(memory) + bytes > bytes_of_device_memory())
    return nccl::kInvalidArgument;
  group_comm = comm;
  call->group().stream = stream;
  add_to(*call.get());
  return nccl::kSuccess;
}

}  // namespace

// NOLINTBEGIN(readability-identifier-naming): the names are NCCL's.
#define ZR_NCCL extern "C" __attribute__((visibility("default")))

ZR_NCCL Result ncclGetVersion(int* version) {
  *version = number_in_environment("ZR_SIM_NCCL_VERSION", 22809);
  return nccl::kSuccess;
}
ZR_NCCL Result ncclGetUniqueId(nccl::UniqueId* id) {
  const int file = ::memfd_create("zr_sim_nccl", MFD_CLOEXEC);  // peers open it later
  if (file < 0 || ::ftruncate(file, sizeof(Page)) != 0) return nccl::kInvalidUsage;
  const int64_t name[2] = {::getpid(), file};
  *id = {};
  std::memcpy(id->internal, name, sizeof name);
  return nccl::kSuccess;
}
ZR_NCCL Result ncclCommInitRankConfig(nccl::Comm* comm, int world, nccl::UniqueId id, int rank, nccl::Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || world > kRanks) return nccl::kInvalidArgument;
  auto* const opened = new Communicator(id, rank, world);
  if (!opened->is_valid()) {
    delete opened;
    return nccl::kRemoteError;
  }
  const std::lock_guard<std::mutex> lock(registry_mutex);
  registry().insert(opened);
  *comm = reinterpret_cast<nccl::Comm>(opened);
  return nccl::kInProgress;
}
ZR_NCCL Result ncclCommFinalize(nccl::Comm comm) {
  const Call call(comm);
  if (call->registered != 0) misuse("memory is still registered when the communicator is finalized");
  if (number_in_environment("ZR_SIM_NCCL_REGISTERED", 0) > call->most_registered) misuse("no memory was registered");
  call->finalize();
  return nccl::kInProgress;
}
ZR_NCCL Result ncclCommDestroy(nccl::Comm comm) { return close(comm, false); }
ZR_NCCL Result ncclCommAbort(nccl::Comm comm) { return close(comm, true); }
ZR_NCCL Result ncclCommGetAsyncError(nccl::Comm comm, Result* state) {
  const Call call(comm);
  *state = call->state();
  return nccl::kSuccess;
}
ZR_NCCL const char* ncclGetErrorString(Result result) {
  return result == nccl::kRemoteError ? "remote process exited or there was a network error" : "simulated error";
}
ZR_NCCL const char* ncclGetLastError(nccl::Comm comm) {
  const Call call(comm);
  return call->error_text();
}

ZR_NCCL Result ncclCommRegister(nccl::Comm comm, void* memory, size_t bytes, void** handle) {
  const Call call(comm);
  if (!call->is_ready()) misuse("memory is registered before the communicator is ready");
  if (function_of_device<uint64_t(const void*)>("zr_sim_offset")(memory) + bytes > bytes_of_device_memory())
    return nccl::kInvalidArgument;
  call->most_registered = std::max(call->most_registered, ++call->registered);
  *handle = memory;
  return nccl::kSuccess;
}
ZR_NCCL Result ncclCommDeregister(nccl::Comm comm, void*) {
  const Call call(comm);
  --call->registered;
  return nccl::kSuccess;
}

ZR_NCCL Result ncclGroupStart() {
  ++group_depth;
  return nccl::kSuccess;
}
ZR_NCCL Result ncclGroupEnd() {
  --group_depth;
  if (!group_comm) return nccl::kSuccess;
  const Call call(std::exchange(group_comm, nullptr));
  return call->launch();
}
ZR_NCCL Result ncclSend(const void* data, size_t count, int, int peer, nccl::Comm comm, void* stream) {
  return add(comm, data, count, stream, [&](Communicator& to) {
    to.group().sends.push_back({peer, const_cast<char*>(static_cast<const char*>(data)), count, 0});
  });
}
ZR_NCCL Result ncclRecv(void* data, size_t count, int, int peer, nccl::Comm comm, void* stream) {
  return add(comm, data, count, stream, [&](Communicator& to) {
    to.group().receives.push_back({peer, static_cast<char*>(data), count, 0});
  });
}
ZR_NCCL Result ncclAllGather(const void* part, void* all, size_t count, int, nccl::Comm comm, void* stream) {
  return add(comm, part, count, stream, [&](Communicator& to) {
    char* const data = const_cast<char*>(static_cast<const char*>(part));
    for (int r = 0; r < to.world(); ++r) {
      char* const at = static_cast<char*>(all) + static_cast<size_t>(r) * count;
      if (r == to.rank()) {
        to.copy_own(at, part, count);
      } else {
        to.group().sends.push_back({r, data, count, 0});
        to.group().receives.push_back({r, at, count, 0});
      }
    }
  });
}
ZR_NCCL Result ncclBroadcast(const void* from, void* data, size_t count, int, int root, nccl::Comm comm, void* stream) {
  return add(comm, data, count, stream, [&](Communicator& to) {
    if (to.rank() != root) return to.group().receives.push_back({root, static_cast<char*>(data), count, 0});
    to.copy_own(data, from, count);
    for (int r = 0; r < to.world(); ++r)
      if (r != root) to.group().sends.push_back({r, const_cast<char*>(static_cast<const char*>(from)), count, 0});
  });
}
// NOLINTEND(readability-identifier-naming)
