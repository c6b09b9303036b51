// The offload tier "@ID@": allocations are memory of malloc().
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "zr/offload.hpp"

namespace {

class Plugin : public zr::Offload<Plugin> {
 public:
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

  // The id of an allocation is its address.
  uint64_t reserve(uint64_t bytes, const char* tag) {
    if (bytes > capacity_ - used_)
      throw zr::PluginError(ZR_NOMEM, "cannot store " + std::to_string(bytes) + " bytes of '" + tag + "': " +
                                          std::to_string(capacity_ - used_) + " bytes are left; increase capacity");
    auto* block = static_cast<Block*>(std::malloc(sizeof(Block) + bytes));
    if (!block) throw std::bad_alloc();
    block->bytes = bytes;
    used_ += bytes;
    return reinterpret_cast<uintptr_t>(block);
  }
  void release(uint64_t allocation) noexcept {
    Block* block = block_of(allocation);
    used_ -= block->bytes;
    std::free(block);
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
  struct alignas(std::max_align_t) Block {  // is followed by its bytes
    uint64_t bytes;
  };
  static Block* block_of(uint64_t allocation) { return reinterpret_cast<Block*>(static_cast<uintptr_t>(allocation)); }

  // Checks all transfers before it starts the first. The copies are complete on return.
  template <class Copy>
  void run(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done, Copy copy) const {
    if (stream) throw zr::PluginError(ZR_UNSUPPORTED, "transfers on streams are not supported");
    for (uint32_t i = 0; i < n; ++i) {
      const uint64_t size = block_of(transfers[i].allocation)->bytes, first = transfers[i].offset;
      if (first > size || static_cast<uint64_t>(transfers[i].memory.count) > size - first)
        throw zr::PluginError(ZR_INVALID, "transfer " + std::to_string(i) + " exceeds its allocation", i);
    }
    for (uint32_t i = 0; i < n; ++i)
      if (transfers[i].memory.count > 0)
        copy(reinterpret_cast<char*>(block_of(transfers[i].allocation) + 1) + transfers[i].offset,
             transfers[i].memory.data, static_cast<std::size_t>(transfers[i].memory.count));
    if (done) zr::Done::retained(host_, done).resolve();
  }

  const zr::Host host_;
  const uint64_t capacity_;
  std::atomic<uint64_t> used_{0};  // caps(), read() and write() run on any thread
};

}  // namespace

ZR_OFFLOAD(Plugin, "@ID@", "@VENDOR@", "0.1.0");
