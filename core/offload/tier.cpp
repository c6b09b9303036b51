#include "offload/tier.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/host_view.hpp"
#include "base/log.hpp"

namespace zr::host::offload {

namespace {
constexpr uint64_t kMaxAlign = uint64_t{2} << 20;  // of the memory that the host allocates for transfers
constexpr uint64_t kCpuMemory = uint64_t{1} << ZR_DEVICE_CPU;

std::string problem_of(const zr_offload_caps& caps, const zr_offload_api& api) {
  if (caps.io_align > kMaxAlign || (caps.io_align & (caps.io_align - 1)) != 0)
    return fmt::format("io_align is {}, but it must be a power of two up to {}", caps.io_align, kMaxAlign);
  if ((caps.device_types & kCpuMemory) == 0)
    return fmt::format("device_types is {:#x}, without CPU memory ({:#x}), from which the host transfers",
                       caps.device_types, kCpuMemory);
  if ((caps.flags & ZR_TIER_MAPPABLE) && !(ZR_HAS(&api, zr_offload_api, map) && ZR_HAS(&api, zr_offload_api, unmap)))
    return "flags has ZR_TIER_MAPPABLE, but map or unmap is null";
  return "";
}

// The memory of an allocation of `bytes`.
std::string problem_of(const zr_view& view, int64_t bytes, int64_t align) {
  if (!view.data) return "the memory is null";
  if (std::string problem = host_view_problem("the memory", view); !problem.empty()) return problem;
  if (view.dtype != ZR_U8 || view.count < bytes)
    return fmt::format("the memory has {} elements of dtype {}, but the allocation has {} bytes (dtype {})", view.count,
                       view.dtype, bytes, ZR_U8);
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(align) != 0)
    return fmt::format("the memory is not aligned to {} bytes", align);
  return "";
}
}  // namespace

plan::TierInfo tier_info_of(const plugin::Instance& tier) {
  zr_offload_caps caps{};
  caps.size = sizeof caps;
  const auto* api = tier.api<zr_offload_api>();
  tier.call("caps", [&](zr_error* error) { return api->caps(tier.self(), &caps, error); });
  if (const std::string problem = problem_of(caps, *api); !problem.empty())
    fail_plugin_bug(tier.call_text("caps"), problem);
  const bool mappable = caps.flags & ZR_TIER_MAPPABLE;
  return {tier.component().table->id,
          mappable ? Tier::host : Tier::disk,
          std::max<int64_t>(caps.io_bytes, 4096),
          std::max<int64_t>(caps.io_depth, 1),
          std::max<int64_t>(caps.io_align, 64),
          static_cast<int64_t>(caps.host_bytes_per_mib)};
}

Transfer::Transfer(const plugin::Instance& tier, zr_done* done, std::string what, std::shared_ptr<TierHealth> health)
    : tier_(&tier), done_(done), what_(std::move(what)), health_(std::move(health)) {}

Transfer::~Transfer() {
  if (!done_) return;
  health_->wait(done_, what_);
  comm::done_release(done_);
}

Transfer::Transfer(Transfer&& other) noexcept
    : tier_(other.tier_),
      done_(std::exchange(other.done_, nullptr)),
      what_(std::move(other.what_)),
      health_(std::move(other.health_)) {}

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  std::swap(tier_, other.tier_);
  std::swap(done_, other.done_);
  std::swap(what_, other.what_);
  std::swap(health_, other.health_);
  return *this;
}

bool Transfer::is_over() const { return !done_ || done_->code.load(std::memory_order_acquire) != ZR_AGAIN; }

void Transfer::wait() {
  if (!done_) return;
  health_->wait(done_, what_);
  CallError error;
  const zr_code code = comm::done_poll(done_, &error);
  comm::done_release(std::exchange(done_, nullptr));
  health_->check(code, error, fmt::format("{}: {}", tier_->call_text("transfer"), what_));
}

TierStore::TierStore(plugin::PluginHost& host, std::shared_ptr<const plugin::Instance> instance, int index,
                     std::chrono::milliseconds long_wait)
    : host_(host),
      instance_(std::move(instance)),
      api_(instance_->api<zr_offload_api>()),
      index_(index),
      health_(std::make_shared<TierHealth>(instance_->call_text("transfer"), long_wait)) {
  instance_->call("open", [&](zr_error* error) { return api_->open(instance_->self(), error); });
  info_ = tier_info_of(*instance_);
}

TierStore::~TierStore() {
  while (!allocations_.empty()) release(allocations_.back().id);
}

uint64_t TierStore::reserve(int64_t bytes, std::vector<LedgerEntry> entries) {
  uint64_t id = 0;
  instance_->call("reserve", [&](zr_error* error) {
    return api_->reserve(instance_->self(), static_cast<uint64_t>(bytes), entries.front().tag.c_str(), &id, error);
  });
  if (std::any_of(allocations_.begin(), allocations_.end(), [&](const Allocation& known) { return known.id == id; }))
    fail_plugin_bug(instance_->call_text("reserve"),
                    fmt::format("the new allocation has the id {} of another one", id));
  allocations_.push_back({id, bytes, {}, false});
  try {
    for (LedgerEntry& entry : entries) {
      const LedgerEntry& added = allocations_.back().entries.emplace_back(std::move(entry));
      host_.ledger().add(info_.tier, added.kind, added.tag, added.bytes);  // counts the bytes even if it throws
    }
  } catch (...) {
    release(id);
    throw;
  }
  return id;
}

void TierStore::release(uint64_t allocation) {
  const auto at = std::find_if(allocations_.begin(), allocations_.end(),
                               [&](const Allocation& known) { return known.id == allocation; });
  if (at == allocations_.end()) return;
  if (at->mapped) call_plugin_void(instance_->call_text("unmap"), [&] { api_->unmap(instance_->self(), allocation); });
  call_plugin_void(instance_->call_text("release"), [&] { api_->release(instance_->self(), allocation); });
  for (const LedgerEntry& entry : at->entries) host_.ledger().add(info_.tier, entry.kind, entry.tag, -entry.bytes);
  allocations_.erase(at);
}

void* TierStore::map(uint64_t allocation) {
  const auto at = std::find_if(allocations_.begin(), allocations_.end(),
                               [&](const Allocation& known) { return known.id == allocation; });
  if (at == allocations_.end() || !info_.in_memory()) fail_internal("this allocation of a tier cannot be mapped");
  zr_view view{};
  instance_->call("map", [&](zr_error* error) { return api_->map(instance_->self(), allocation, &view, error); });
  at->mapped = true;
  if (const std::string problem = problem_of(view, at->bytes, info_.align); !problem.empty())
    fail_plugin_bug(instance_->call_text("map"), problem);
  return view.data;
}

Transfer TierStore::start(bool writes, uint64_t allocation, int64_t offset, void* memory, int64_t bytes,
                          const std::string& what) {
  const zr_transfer request{allocation, static_cast<uint64_t>(offset), {memory, bytes, ZR_U8, 0, {1, 0}}};
  Transfer transfer(*instance_, comm::done_new(host_.abi()), what, health_);
  zr_done* done = transfer.done();
  if (!done) fail_environment(fmt::format("cannot allocate a transfer for tier '{}'", info_.id));
  if (trace_)
    done->on_resolved = [trace = trace_, track = info_.id, name = (writes ? "write " : "read ") + what,
                         begin = Trace::Time::clock::now()](zr_code) {
      trace->span(track, name, begin, Trace::Time::clock::now());
    };
  CallError error;
  const auto function = writes ? api_->write : api_->read;
  const zr_code code = [&] {
    const TierHealth::Call call(*health_, what);
    return call_plugin(&error, [&] { return function(instance_->self(), &request, 1, nullptr, done, &error); });
  }();
  if (code != ZR_OK) {
    comm::done_resolve(done, code == ZR_AGAIN ? ZR_INTERNAL : code, 0, plugin_text(error).c_str());
    health_->check(code, error, fmt::format("{}: {}", instance_->call_text(writes ? "write" : "read"), what));
  }
  (writes ? written_ : read_) += bytes;
  return transfer;
}

Transfer TierStore::read(uint64_t allocation, int64_t offset, void* memory, int64_t bytes, const std::string& what) {
  return start(false, allocation, offset, memory, bytes, what);
}

Transfer TierStore::write(uint64_t allocation, int64_t offset, const void* memory, int64_t bytes,
                          const std::string& what) {
  return start(true, allocation, offset, const_cast<void*>(memory), bytes, what);
}

void TierStore::register_memory(void* memory, int64_t bytes) {
  if (!ZR_HAS(api_, zr_offload_api, reg)) return;
  const zr_view view{memory, bytes, ZR_U8, 0, {1, 0}};
  CallError error;
  if (call_plugin(&error, [&] { return api_->reg(instance_->self(), &view, &error); }) != ZR_OK)
    log(ZR_LOG_INFO, fmt::format("{}: {}", instance_->call_text("reg"), plugin_text(error)));
}

void TierStore::unregister_memory(void* memory, int64_t bytes) {
  if (!ZR_HAS(api_, zr_offload_api, unreg)) return;
  const zr_view view{memory, bytes, ZR_U8, 0, {1, 0}};
  call_plugin_void(instance_->call_text("unreg"), [&] { api_->unreg(instance_->self(), &view); });
}

}  // namespace zr::host::offload
