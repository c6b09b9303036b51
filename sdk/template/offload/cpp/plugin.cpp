// The offload tier "@ID@": allocations are memory of the process.
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "zr/offload.hpp"

namespace {

class Plugin : public zr::Offload<Plugin> {
 public:
  static constexpr const char* description = "memory of the process";
  static constexpr zr_key keys[] = {
      zr::key_bytes("capacity", "\"1GiB\"", 0, 1e15, "largest number of bytes that a rank stores")};

  Plugin(const zr::Config& config, const zr::Host& host)
      : host_(host), capacity_(static_cast<uint64_t>(config.integer("capacity"))) {}

  zr_offload_caps caps() const {
    zr_offload_caps caps{};
    caps.capacity = capacity_;
    caps.io_align = 1;
    caps.io_bytes = 1 << 20;
    caps.io_depth = 1;
    caps.device_types = zr::kCpuOnly;
    return caps;
  }

  uint64_t reserve(uint64_t bytes, const char* tag) {
    const std::lock_guard lock(mutex_);
    if (bytes > capacity_ - used_)
      throw zr::PluginError(ZR_NOMEM, "cannot store " + std::to_string(bytes) + " bytes of '" + tag + "': " +
                                          std::to_string(capacity_ - used_) + " bytes are left; increase capacity");
    allocations_[++last_id_].resize(bytes);
    used_ += bytes;
    return last_id_;
  }
  void release(uint64_t allocation) noexcept {
    const std::lock_guard lock(mutex_);
    used_ -= allocations_[allocation].size();
    allocations_.erase(allocation);
  }

  void write(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done) {
    run(transfers, n, stream, done,
        [](char* stored, void* memory, std::size_t bytes) { std::memcpy(stored, memory, bytes); });
  }
  void read(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done) {
    run(transfers, n, stream, done,
        [](char* stored, void* memory, std::size_t bytes) { std::memcpy(memory, stored, bytes); });
  }

 private:
  // Checks all transfers before it starts the first.
  template <class Copy>
  void run(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done, Copy copy) {
    if (stream) throw zr::PluginError(ZR_UNSUPPORTED, "transfers on streams are not supported");
    std::vector<char*> stored(n);
    for (uint32_t i = 0; i < n; ++i) stored[i] = address_of(transfers[i], i);
    for (uint32_t i = 0; i < n; ++i)
      if (transfers[i].memory.count > 0)
        copy(stored[i], transfers[i].memory.data, static_cast<std::size_t>(transfers[i].memory.count));
    if (done) zr::Done::retained(host_, done).resolve();
  }
  char* address_of(const zr_transfer& transfer, uint32_t index) {
    const std::lock_guard lock(mutex_);
    const auto found = allocations_.find(transfer.allocation);
    const uint64_t bytes = found == allocations_.end() ? 0 : found->second.size();
    if (found == allocations_.end() || transfer.offset > bytes ||
        static_cast<uint64_t>(transfer.memory.count) > bytes - transfer.offset)
      throw zr::PluginError(ZR_INVALID, "transfer " + std::to_string(index) + " is not within an allocation", index);
    return found->second.data() + transfer.offset;
  }

  const zr::Host host_;
  const uint64_t capacity_;
  std::mutex mutex_;  // of what follows: read() and write() run on several threads, also during reserve()
  uint64_t used_ = 0, last_id_ = 0;
  std::map<uint64_t, std::vector<char>> allocations_;  // by id; their addresses do not change
};

}  // namespace

ZR_OFFLOAD(Plugin, "@ID@", "@VENDOR@", "0.1.0");
