#include "conform/simulated_device.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/device.h"

namespace zr::conform {

SimulatedDevice::~SimulatedDevice() {
  const MutexLock lock(mutex_);
  for (const auto& [address, block] : blocks_) ::munmap(address, block.reserved);
}

char* SimulatedDevice::allocate(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  const std::size_t reserved = bytes / kPage * kPage + kPage;  // also an address for no bytes
  void* const mapped = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  auto backing = std::make_unique<Array>(bytes);
  std::memset(backing->data(), 0, bytes);
  const MutexLock lock(mutex_);
  blocks_.emplace(static_cast<char*>(mapped), Block{std::move(backing), reserved});
  return static_cast<char*>(mapped);
}

bool SimulatedDevice::free(const void* address) {
  const MutexLock lock(mutex_);
  const auto found = blocks_.find(static_cast<char*>(const_cast<void*>(address)));
  if (found == blocks_.end() || found->second.freed) return false;
  found->second.freed = true;
  return true;
}

char* SimulatedDevice::backing(const void* address) const {
  char* const at = static_cast<char*>(const_cast<void*>(address));
  const MutexLock lock(mutex_);
  auto next = blocks_.upper_bound(at);
  if (next == blocks_.begin()) return nullptr;
  const auto& [start, block] = *--next;
  const auto offset = static_cast<std::size_t>(at - start);
  return offset <= block.backing->size() ? block.backing->data() + offset : nullptr;
}

zr_stream* SimulatedDevice::stream(int rank) const {
  const MutexLock lock(mutex_);
  return reinterpret_cast<zr_stream*>(
      &streams_.try_emplace(rank, Stream{const_cast<SimulatedDevice*>(this)}).first->second);
}

const zr_stream_service& SimulatedDevice::service() {
  static constexpr zr_stream_service kService{
      sizeof(zr_stream_service),
      0,
      [](zr_stream* stream) -> void* { return stream; },
      [](zr_stream* stream) { return reinterpret_cast<Stream*>(stream)->device->device(); },
      [](zr_stream*, zr_stream**, zr_error*) { return zr_code{ZR_UNSUPPORTED}; },
      [](zr_stream*) {},
      [](zr_stream*, zr_event**, zr_error*) { return zr_code{ZR_UNSUPPORTED}; },
      [](zr_stream*, zr_event*, zr_error*) { return zr_code{ZR_UNSUPPORTED}; },
      [](zr_event*) {}};
  return kService;
}

namespace {
bool has_type(uint64_t device_types, int32_t type) { return device_types >> type & 1; }
}  // namespace

int32_t simulated_type(uint64_t device_types) {
  if (has_type(device_types, ZR_DEVICE_EXTENSION)) return ZR_DEVICE_EXTENSION;
  for (int32_t type = ZR_DEVICE_CPU + 1; type < 64; ++type)
    if (has_type(device_types, type)) return type;
  return -1;
}

std::string text_of_device_types(uint64_t device_types) {
  if (~device_types == 0) return "any device";
  std::string text;
  for (int32_t type = ZR_DEVICE_CPU + 1; type < 64; ++type)
    if (has_type(device_types, type)) text += concat(text.empty() ? "" : " or ", "a device of type ", type);
  return text.empty() ? "a device" : text;
}

}  // namespace zr::conform
