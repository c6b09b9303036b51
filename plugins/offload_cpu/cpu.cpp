// The tier "cpu": allocations are memory of this machine, which the host may also use in place.
#include <cstring>
#include <memory>
#include <unordered_map>

#include "copy.hpp"
#include "memory.hpp"
#include "pin.hpp"
#include "zr/mutex.hpp"
#include "zr/offload.hpp"

namespace {

constexpr std::size_t kStreamedWrites = std::size_t{256} << 10, kStreamedReads = std::size_t{4} << 20;

class Cpu : public zr::Offload<Cpu> {
 public:
  static constexpr const char* description = "memory of the CPU";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::key_text("pin", "\"auto\"", "auto|true|false", "lock memory for a CUDA device, if there is one")};
  Cpu(const zr::Config& config, const zr::Host& host) : host_(host), pin_(host, config.text("pin")) {}
  ~Cpu() {
    const zr::MutexLock lock(mutex_);
    for (const auto& [id, allocation] : allocations_)
      if (allocation.locked) pin_.unlock(allocation.block->data());
  }

  zr_offload_caps caps() const {
    zr_offload_caps caps{};
    const cpu::AvailableMemory memory = cpu::available_memory();
    const zr::MutexLock lock(mutex_);
    caps.capacity = memory.bytes < 0 ? 0 : static_cast<uint64_t>(memory.bytes) + mapped_;
    caps.io_align = 1;
    caps.io_bytes = uint64_t{1} << 20;
    caps.io_depth = 1;
    caps.device_types = uint64_t{1} << 1;
    return caps;
  }

  uint64_t reserve(uint64_t bytes, const char* tag) {
    Allocation allocation{std::make_unique<cpu::Block>(host_, bytes, tag), false};
    allocation.locked = pin_.lock(allocation.block->data(), allocation.block->mapped());
    const zr::MutexLock lock(mutex_);
    mapped_ += allocation.block->mapped();
    allocations_.emplace(++last_, std::move(allocation));
    return last_;
  }
  void release(uint64_t id) noexcept {
    const zr::MutexLock lock(mutex_);
    const auto found = allocations_.find(id);
    if (found == allocations_.end())
      return host_.log(ZR_LOG_ERROR, "tier cpu: release of unknown allocation " + std::to_string(id));
    if (found->second.locked) pin_.unlock(found->second.block->data());
    mapped_ -= found->second.block->mapped();
    allocations_.erase(found);
  }

  // Large writes bypass the cache. Data that is read is used next, so it stays in the cache if it fits.
  void write(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done) {
    start(transfers, n, stream, done, [](char* allocation, char* memory, std::size_t bytes) {
      bytes < kStreamedWrites ? static_cast<void>(std::memcpy(allocation, memory, bytes))
                              : cpu::stream(allocation, memory, bytes);
    });
  }
  void read(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done) {
    start(transfers, n, stream, done, [](char* allocation, char* memory, std::size_t bytes) {
      bytes < kStreamedReads ? static_cast<void>(std::memcpy(memory, allocation, bytes))
                             : cpu::stream(memory, allocation, bytes);
    });
  }

  zr_view map(uint64_t id) {
    const zr::MutexLock lock(mutex_);
    const auto found = allocations_.find(id);
    if (found == allocations_.end())
      throw zr::PluginError(ZR_INVALID,
                            "tier cpu: cannot map allocation " + std::to_string(id) + ", which is not reserved");
    const cpu::Block& block = *found->second.block;
    return {block.data(), static_cast<int64_t>(block.bytes()), ZR_U8, 0, {1, 0}};
  }
  void unmap(uint64_t) noexcept {}

 private:
  struct Allocation {
    std::unique_ptr<cpu::Block> block;
    bool locked;
  };

  // Validates all transfers before it starts the first.
  template <class Copy>
  void start(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done, Copy&& copy) {
    if (stream)
      throw zr::PluginError(ZR_UNSUPPORTED, "tier cpu does not support streams; wait for the stream, and pass none");
    for (uint32_t i = 0; i < n; ++i) address_of(transfers[i], i);
    for (uint32_t i = 0; i < n; ++i)
      if (transfers[i].memory.count > 0)
        copy(address_of(transfers[i], i), static_cast<char*>(transfers[i].memory.data),
             static_cast<std::size_t>(transfers[i].memory.count));
    if (done) zr::Done::retained(host_, done).resolve();
  }
  char* address_of(const zr_transfer& transfer, uint32_t index) const {
    const auto reject = [&](const std::string& what) {
      throw zr::PluginError(ZR_INVALID, "tier cpu: transfer " + std::to_string(index) + " " + what, index);
    };
    const zr::MutexLock lock(mutex_);
    const auto allocation = allocations_.find(transfer.allocation);
    if (allocation == allocations_.end())
      reject("refers to allocation " + std::to_string(transfer.allocation) + ", which is not reserved");
    if (transfer.memory.dtype != ZR_U8 || transfer.memory.device.type != 1)
      reject("must be a view of bytes in CPU memory");
    const uint64_t size = allocation->second.block->bytes(), bytes = static_cast<uint64_t>(transfer.memory.count);
    if (transfer.offset > size || bytes > size - transfer.offset)
      reject("(" + std::to_string(bytes) + " bytes at byte " + std::to_string(transfer.offset) +
             ") exceeds its allocation of " + std::to_string(size) + " bytes");
    return allocation->second.block->data() + transfer.offset;
  }

  const zr::Host host_;
  cpu::Pin pin_;
  mutable zr::Mutex mutex_;
  std::unordered_map<uint64_t, Allocation> allocations_ ZR_GUARDED_BY(mutex_);
  uint64_t mapped_ ZR_GUARDED_BY(mutex_) = 0;
  uint64_t last_ ZR_GUARDED_BY(mutex_) = 0;  // id of the last allocation
};

}  // namespace

ZR_OFFLOAD(Cpu, "cpu", "zeroth", "1.0.0");
