#include "comm/comm_runtime.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/open_communicator.hpp"

namespace zr::host::comm {

namespace {
constexpr int64_t kTransferGranularity = 64;  // the bytes per rank of a transfer are a multiple of it

// Calls fn(first, count) for consecutive ranges of [0, total), so that `shares` of them fit the staging buffer.
template <class Fn>
void for_each_transfer(int64_t total, int64_t shares, int64_t staging_bytes, Fn&& fn) {
  const int64_t length = staging_bytes / shares / kTransferGranularity * kTransferGranularity;
  for (int64_t first = 0; first < total; first += length) fn(first, std::min(length, total - first));
}
}  // namespace

CommRuntime::CommRuntime(plugin::PluginHost& host, std::shared_ptr<control::Control> control,
                         const plugin::Instance* instance, Options options)
    : host_(host),
      control_(std::move(control)),
      instance_(instance),
      options_(options),
      rank_(control_->rank()),
      world_(control_->world()),
      counter_(rank_, world_, std::ranges::max(control_->hosts()) + 1) {
  Ledger& ledger = host.ledger();
  const int64_t before = ledger.held(Tier::host, MemoryKind::communicator), staging = staging_bytes(world_);
  if (world_ > 1) {
    if (!instance_) fail_internal(fmt::format("a communicator of {} ranks was created without a plug-in", world_));
    caps_ = communicator_caps(*instance_);
    on_host_ = open(kHostMemory);
    watchdog_ = std::jthread([this](const std::stop_token& stop) { run_watchdog(stop); });
    control_->on_broken(this, [this] { abort(); });
  }
  try {
    // The memory that the plug-in takes when it opens becomes its plan, or more for quantized values; other allocations
    // show as a peak above the plan.
    const int64_t opened = ledger.held(Tier::host, MemoryKind::communicator) - before;
    const uint32_t quantized = (options.gradients | options.weights) & (uint32_t{ZR_COLL_INT8} | ZR_COLL_INT4);
    ledger.plan(Tier::host, MemoryKind::communicator,
                (quantized ? std::max(opened, options.planned_bytes) : opened) + staging);
    message_staging_ =
        static_cast<char*>(allocate(staging, 64, Tier::host, MemoryKind::communicator, "control messages"));
    host.set_context(this);
  } catch (...) {
    close();
    throw;
  }
}

CommRuntime::~CommRuntime() {
  host_.set_context<CommRuntime>(nullptr);
  close();
  for (auto& [memory, m] : memory_) {
    host_.ledger().add(m.tier, m.kind, m.tag, -m.bytes);
    if (m.from == Memory::From::device) device_->free(memory);
  }
}

void CommRuntime::open_on(DeviceMemory& device) {
  Ledger& ledger = host_.ledger();
  const int64_t before = ledger.held(Tier::host, MemoryKind::communicator);
  if (world_ > 1) {
    on_device_ = open(device.device());
    const MutexLock lock(abort_mutex_);
    to_abort_on_device_ = on_device_.get();
  }
  device_ = &device;
  device.watch_waits([this](const std::function<void()>& wait) { wait_for_device(wait); });
  ledger.plan(Tier::host, MemoryKind::communicator, ledger.held(Tier::host, MemoryKind::communicator) - before);
}

void CommRuntime::close() {
  staging_.clear();
  if (device_) device_->watch_waits({});
  if (!on_host_) return;
  if (on_device_) end_device();
  control_->on_broken(this, {});
  watchdog_ = {};
  {
    const MutexLock lock(abort_mutex_);
    to_abort_on_device_ = nullptr;
  }
  on_device_.reset();
  enqueued_.clear();
  on_host_.reset();
}

int64_t CommRuntime::staging_bytes(int world) {
  return std::max<int64_t>(64 << 10, kTransferGranularity * (world + 1));
}

void CommRuntime::barrier(const char* label) {
  zr_coll coll{};
  coll.op = ZR_BARRIER;
  coll.label = label;
  run_control(coll);
}

std::vector<std::string> CommRuntime::all_gather_bytes(const std::string& bytes, const char* label) {
  const int n = world_;
  const auto length = static_cast<int64_t>(bytes.size());
  std::vector<std::string> all(static_cast<std::size_t>(n), std::string(bytes.size(), '\0'));
  for_each_transfer(length, n + 1, staging_bytes(n), [&](int64_t first, int64_t count) {
    char* const part = message_staging_ + n * count;
    std::memcpy(part, bytes.data() + first, static_cast<std::size_t>(count));
    zr_coll coll{};
    coll.op = ZR_ALL_GATHER;
    coll.src = {part, count, ZR_U8, 0, {1, 0}};
    coll.dst = {message_staging_, n * count, ZR_U8, 0, {1, 0}};
    coll.label = label;
    run_control(coll);
    for (int r = 0; r < n; ++r)
      std::memcpy(all[static_cast<std::size_t>(r)].data() + first, message_staging_ + r * count,
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
  std::memcpy(message_staging_, &length, sizeof length);
  coll.src = coll.dst = {message_staging_, 1, ZR_I64, 0, {1, 0}};
  run_control(coll);
  std::memcpy(&length, message_staging_, sizeof length);
  std::string bytes = rank_ == root ? bytes_of_root : std::string(static_cast<std::size_t>(length), '\0');
  for_each_transfer(length, 1, staging_bytes(world_), [&](int64_t first, int64_t count) {
    if (rank_ == root) std::memcpy(message_staging_, bytes_of_root.data() + first, static_cast<std::size_t>(count));
    coll.src = coll.dst = {message_staging_, count, ZR_U8, 0, {1, 0}};
    run_control(coll);
    std::memcpy(bytes.data() + first, message_staging_, static_cast<std::size_t>(count));
  });
  return bytes;
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

// Counts the memory until free().
void* CommRuntime::keep(void* memory, Memory properties) {
  const Memory& m = memory_.emplace(memory, std::move(properties)).first->second;
  try {
    host_.ledger().add(m.tier, m.kind, m.tag, m.bytes);
  } catch (...) {  // the ledger has counted it, and free() subtracts it
    free(memory);
    throw;
  }
  return memory;
}

void* CommRuntime::allocate(int64_t bytes, int64_t align, Tier tier, MemoryKind kind, const std::string& tag) {
  const int64_t length = std::max<int64_t>(bytes, 64);
  if (on_host_) {
    const auto peers_align = static_cast<uint64_t>(std::max<int64_t>(align, 64));
    if (void* const memory = on_host_->mem_alloc(static_cast<uint64_t>(length), peers_align))
      return keep(memory, {bytes, tier, kind, tag, Memory::From::plugin, {}});
  }
  HugePageMemory host_memory = allocate_huge_pages(length, align);
  if (!host_memory)
    fail_environment(
        fmt::format("cannot allocate {} for {} (each rank needs this amount); use more ranks or a smaller model",
                    bytes_text(bytes), tag));
  void* const memory = std::memset(host_memory.get(), 0, static_cast<std::size_t>(length));
  return keep(memory, {bytes, tier, kind, tag, Memory::From::host, std::move(host_memory)});
}

void* CommRuntime::allocate_on_device(int64_t bytes, MemoryKind kind, const std::string& tag, Readers readers) {
  OpenCommunicator* const peers = readers == Readers::peers ? on_device_.get() : nullptr;
  void* memory = peers ? allocate_for_peers(*peers, *device_, bytes, tag) : nullptr;
  const auto from = memory ? Memory::From::device_plugin : Memory::From::device;
  if (!memory) memory = device_->allocate(bytes);
  return keep(memory, {bytes, Tier::device, kind, tag, from, {}});
}

void CommRuntime::free(void* memory) {
  const auto at = memory_.find(memory);
  if (at == memory_.end()) return;
  host_.ledger().add(at->second.tier, at->second.kind, at->second.tag, -at->second.bytes);
  switch (at->second.from) {
    case Memory::From::plugin: on_host_->mem_free(memory); break;
    case Memory::From::shared_weights: on_host_->shared_free(memory); break;
    case Memory::From::device_plugin:
      device_->flush();
      on_device_->mem_free(memory);
      break;
    case Memory::From::device: device_->free(memory); break;
    case Memory::From::host: break;
  }
  memory_.erase(at);
  std::erase_if(shared_, [&](const auto& range) { return range.first == memory; });
  counter_.remove_buffer(memory);
}

// The plug-in waits for the other ranks of the host, within the time limit.
std::pair<void*, const void*> CommRuntime::allocate_shared(int64_t bytes, int64_t share, Tier tier, MemoryKind kind,
                                                           const std::string& tag) {
  const std::string outer = activity_.what, what = "the allocation of memory that the ranks of a host share";
  std::pair<void*, const void*> views;
  try {
    activity_.what = what;
    const Waiting waiting(*this);
    views = on_host_->shared_alloc(static_cast<uint64_t>(std::max<int64_t>(bytes, 64)));
  } catch (const Error& failure) {
    if (exceeded_timeout_ || control_->broken()) {
      activity_.what = what;
      CallError error;
      finish(fill_error(&error, ZR_CANCELLED, failure.what()), &error);
      std::rethrow_exception(take_failure());
    }
    activity_.what = outer;
    throw;
  }
  activity_.what = outer;
  memory_.emplace(views.first, Memory{share, tier, kind, tag, Memory::From::shared_weights, {}});
  host_.ledger().add(tier, kind, tag, share);
  const char* const begin = static_cast<const char*>(views.first);
  shared_.emplace_back(begin, begin + bytes);
  return views;
}

}  // namespace zr::host::comm
