#include "comm/comm_runtime.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.hpp"
#include "base/huge_page_memory.hpp"
#include "base/text.hpp"
#include "comm/submission.hpp"

namespace zr::host::comm {

namespace {
constexpr int64_t kTransferGranularity = 64;  // the bytes per rank of a transfer are a multiple of it
}

// Memory and control messages, in addition to the submission of collectives.
struct CommRuntime::State {
  struct Memory {
    int64_t bytes;
    Tier tier;
    MemoryKind kind;
    std::string tag;
    enum class From { host, plugin, shared_weights, device, device_plugin } from;
    HugePageMemory host_memory;  // set if the host allocated the memory
  };

  State(plugin::PluginHost& h, std::shared_ptr<control::Control> control, const plugin::Instance* instance,
        Options options)
      : host(h), submission(h, std::move(control), instance, options.timeout) {
    submission.set_inexact(options.gradients, options.weights);
    staging_bytes = CommRuntime::staging_bytes(submission.world());
  }

  // Calls fn(first, count) for consecutive ranges of [0, total), so that `shares` of them fit the staging buffer.
  template <class Fn>
  void for_each_transfer(int64_t total, int64_t shares, Fn&& fn) {
    const int64_t length = staging_bytes / shares / kTransferGranularity * kTransferGranularity;
    for (int64_t first = 0; first < total; first += length) fn(first, std::min(length, total - first));
  }

  plugin::PluginHost& host;
  Submission submission;
  std::map<void*, Memory> memory;
  char* staging = nullptr;  // buffer for the host's control messages
  int64_t staging_bytes;
  DeviceMemory* device = nullptr;
};

CommRuntime::CommRuntime(plugin::PluginHost& host, std::shared_ptr<control::Control> control,
                         const plugin::Instance* instance, Options options) {
  Ledger& ledger = host.ledger();
  const int64_t before = ledger.held(Tier::host, MemoryKind::communicator);
  state_ = std::make_unique<State>(host, std::move(control), instance, options);
  // The memory that the plug-in takes when it opens becomes its plan, or more for quantized values; other allocations
  // show as a peak above the plan.
  const int64_t opened = ledger.held(Tier::host, MemoryKind::communicator) - before;
  const uint32_t quantized = (options.gradients | options.weights) & (uint32_t{ZR_COLL_INT8} | ZR_COLL_INT4);
  ledger.plan(Tier::host, MemoryKind::communicator,
              (quantized ? std::max(opened, options.planned_bytes) : opened) + state_->staging_bytes);
  state_->staging =
      static_cast<char*>(allocate(state_->staging_bytes, 64, Tier::host, MemoryKind::communicator, "control messages"));
  state_->submission.set_staging_allocator([this, &ledger] {
    ledger.plan(Tier::host, MemoryKind::communicator, Submission::kStagingBytes);
    return static_cast<char*>(
        allocate(Submission::kStagingBytes, 64, Tier::host, MemoryKind::communicator, "composed collectives"));
  });
  host.set_context(this);
}

CommRuntime::~CommRuntime() {
  State& s = *state_;
  s.host.set_context<CommRuntime>(nullptr);
  s.submission.close();
  for (auto& [memory, m] : s.memory) {
    s.host.ledger().add(m.tier, m.kind, m.tag, -m.bytes);
    if (m.from == State::Memory::From::device) s.device->free(memory);
  }
}

int64_t CommRuntime::staging_bytes(int world) {
  return std::max<int64_t>(64 << 10, kTransferGranularity * (world + 1));
}
int CommRuntime::rank() const { return state_->submission.rank(); }
int CommRuntime::world() const { return state_->submission.world(); }
zr_comm_ref CommRuntime::ref() const { return state_->submission.ref(); }
void CommRuntime::run(zr_coll coll) { state_->submission.run(coll, false); }
void CommRuntime::run_control(zr_coll coll) { state_->submission.run(coll, true); }

void CommRuntime::barrier(const char* label) {
  zr_coll coll{};
  coll.op = ZR_BARRIER;
  coll.label = label;
  run_control(coll);
}

std::vector<std::string> CommRuntime::all_gather_bytes(const std::string& bytes, const char* label) {
  const int n = world();
  const auto length = static_cast<int64_t>(bytes.size());
  std::vector<std::string> all(static_cast<std::size_t>(n), std::string(bytes.size(), '\0'));
  state_->for_each_transfer(length, n + 1, [&](int64_t first, int64_t count) {
    char* const part = state_->staging + n * count;
    std::memcpy(part, bytes.data() + first, static_cast<std::size_t>(count));
    zr_coll coll{};
    coll.op = ZR_ALL_GATHER;
    coll.src = {part, count, ZR_U8, 0, {1, 0}};
    coll.dst = {state_->staging, n * count, ZR_U8, 0, {1, 0}};
    coll.label = label;
    run_control(coll);
    for (int r = 0; r < n; ++r)
      std::memcpy(all[static_cast<std::size_t>(r)].data() + first, state_->staging + r * count,
                  static_cast<std::size_t>(count));
  });
  return all;
}

std::string CommRuntime::broadcast_bytes(const std::string& bytes_of_root, int root, const char* label) {
  zr_coll coll{};
  coll.op = ZR_BROADCAST;
  coll.root = root;
  coll.label = label;
  auto length = static_cast<int64_t>(bytes_of_root.size());
  std::memcpy(state_->staging, &length, sizeof length);
  coll.src = coll.dst = {state_->staging, 1, ZR_I64, 0, {1, 0}};
  run_control(coll);
  std::memcpy(&length, state_->staging, sizeof length);
  std::string bytes = rank() == root ? bytes_of_root : std::string(static_cast<std::size_t>(length), '\0');
  state_->for_each_transfer(length, 1, [&](int64_t first, int64_t count) {
    if (rank() == root) std::memcpy(state_->staging, bytes_of_root.data() + first, static_cast<std::size_t>(count));
    coll.src = coll.dst = {state_->staging, count, ZR_U8, 0, {1, 0}};
    run_control(coll);
    std::memcpy(bytes.data() + first, state_->staging, static_cast<std::size_t>(count));
  });
  return bytes;
}

void* CommRuntime::allocate(int64_t bytes, int64_t align, Tier tier, MemoryKind kind, const std::string& tag) {
  State& s = *state_;
  const int64_t staging = std::max<int64_t>(bytes, 64);
  OpenCommunicator* const peers = s.submission.on_host();
  void* memory =
      peers ? peers->mem_alloc(static_cast<uint64_t>(staging), static_cast<uint64_t>(std::max<int64_t>(align, 64)))
            : nullptr;
  HugePageMemory host_memory;
  if (!memory) {
    host_memory = allocate_huge_pages(staging, align);
    if (!host_memory)
      fail_environment(
          fmt::format("cannot allocate {} for {} (each rank needs this amount); use more ranks or a smaller model",
                      bytes_text(bytes), tag));
    memory = std::memset(host_memory.get(), 0, static_cast<std::size_t>(staging));
  }
  const auto from = host_memory ? State::Memory::From::host : State::Memory::From::plugin;
  s.memory.emplace(memory, State::Memory{bytes, tier, kind, tag, from, std::move(host_memory)});
  try {
    s.host.ledger().add(tier, kind, tag, bytes);
  } catch (...) {  // the ledger has counted it, and free() subtracts it
    free(memory);
    throw;
  }
  return memory;
}

void CommRuntime::open_on(DeviceMemory& device) {
  Ledger& ledger = state_->host.ledger();
  const int64_t before = ledger.held(Tier::host, MemoryKind::communicator);
  state_->device = &device;
  state_->submission.open_on(device);
  ledger.plan(Tier::host, MemoryKind::communicator, ledger.held(Tier::host, MemoryKind::communicator) - before);
}

namespace {
// Memory that peers can open does not come from the library that keeps the device's free memory.
void* allocate_for_peers(OpenCommunicator& peers, DeviceMemory& device, int64_t bytes, const std::string& tag) {
  const auto allocate = [&] { return peers.mem_alloc(static_cast<uint64_t>(std::max<int64_t>(bytes, 64)), 64); };
  try {
    return allocate();
  } catch (const EnvironmentError&) {
    device.release_unused();
  }
  try {
    return allocate();
  } catch (const EnvironmentError& failure) {
    fail_environment(
        fmt::format("cannot allocate {} on the device for {}: {}; use more ranks or a smaller model, or set "
                    "offload.optimizer or offload.gradients to a tier",
                    bytes_text(bytes), tag, failure.what()));
  }
}
}  // namespace

void* CommRuntime::allocate_on_device(int64_t bytes, MemoryKind kind, const std::string& tag, Readers readers) {
  State& s = *state_;
  OpenCommunicator* const peers = readers == Readers::peers ? s.submission.on_device() : nullptr;
  void* memory = peers ? allocate_for_peers(*peers, *s.device, bytes, tag) : nullptr;
  const auto from = memory ? State::Memory::From::device_plugin : State::Memory::From::device;
  if (!memory) memory = s.device->allocate(bytes);
  s.memory.emplace(memory, State::Memory{bytes, Tier::device, kind, tag, from, {}});
  try {
    s.host.ledger().add(Tier::device, kind, tag, bytes);
  } catch (...) {  // the ledger has counted it, and free() subtracts it
    free(memory);
    throw;
  }
  return memory;
}

void CommRuntime::free(void* memory) {
  State& s = *state_;
  const auto at = s.memory.find(memory);
  if (at == s.memory.end()) return;
  s.host.ledger().add(at->second.tier, at->second.kind, at->second.tag, -at->second.bytes);
  switch (at->second.from) {
    case State::Memory::From::plugin: s.submission.on_host()->mem_free(memory); break;
    case State::Memory::From::shared_weights: s.submission.on_host()->shared_free(memory); break;
    case State::Memory::From::device_plugin:
      s.device->flush();
      s.submission.on_device()->mem_free(memory);
      break;
    case State::Memory::From::device: s.device->free(memory); break;
    case State::Memory::From::host: break;
  }
  s.memory.erase(at);
  s.submission.remove_shared(memory);
  s.submission.counter().remove_buffer(memory);
}

std::pair<void*, const void*> CommRuntime::allocate_shared(int64_t bytes, int64_t share, Tier tier, MemoryKind kind,
                                                           const std::string& tag) {
  State& s = *state_;
  const auto views = s.submission.shared_alloc(static_cast<uint64_t>(std::max<int64_t>(bytes, 64)));
  s.memory.emplace(views.first, State::Memory{share, tier, kind, tag, State::Memory::From::shared_weights, {}});
  s.host.ledger().add(tier, kind, tag, share);
  s.submission.add_shared(views.first, bytes);
  return views;
}

void CommRuntime::set_planned_buffer(NonPaddingRanges buffer) {
  state_->submission.counter().set_planned_buffer(std::move(buffer));
}
CommVolume CommRuntime::volume() const { return state_->submission.counter().count(); }
void CommRuntime::set_step(int64_t step) { state_->submission.set_step(step); }
int64_t CommRuntime::issued() const { return state_->submission.issued(); }
int64_t CommRuntime::submitted() const { return state_->submission.submitted(); }
void CommRuntime::on_completed(std::function<void(const zr_coll&, const void*, int64_t)> observer) {
  state_->submission.on_completed(std::move(observer));
}
void CommRuntime::set_collective_staging(CollectiveStaging* staging) {
  state_->submission.set_collective_staging(staging);
}
void CommRuntime::set_trace(Trace* trace) { state_->submission.set_trace(trace); }
void CommRuntime::set_call(std::string call) { state_->submission.set_call(std::move(call)); }
const std::string& CommRuntime::call() const { return state_->submission.call(); }
void CommRuntime::abort() { state_->submission.abort(); }
std::exception_ptr CommRuntime::take_failure() { return state_->submission.take_failure(); }
zr_code CommRuntime::wait(zr_done* done, int64_t timeout_ns, zr_error* error) {
  return state_->submission.wait(done, timeout_ns, error);
}

}  // namespace zr::host::comm
