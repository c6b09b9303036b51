#include "offload/tier_resources.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host::offload {

TrackedMemory::TrackedMemory(int64_t bytes, int64_t align, Ledger& ledger, Tier tier, MemoryKind kind, std::string tag)
    : bytes_(bytes), tier_(tier), kind_(kind), tag_(std::move(tag)) {
  const int64_t size = std::max<int64_t>(bytes, 64);
  memory_ = allocate_huge_pages(size, align);
  if (!memory_)
    fail_environment(
        fmt::format("cannot allocate {} per rank for '{}'; use more ranks, or a strategy that shards this memory",
                    bytes_text(bytes), tag_));
  data_ = memory_.get();
  std::memset(data_, 0, static_cast<std::size_t>(size));
  count(ledger);
}

TrackedMemory::TrackedMemory(int64_t bytes, DeviceMemory& device, Ledger& ledger, MemoryKind kind, std::string tag)
    : device_(&device), bytes_(bytes), tier_(Tier::device), kind_(kind), tag_(std::move(tag)) {
  data_ = static_cast<char*>(device.allocate(bytes));
  try {
    count(ledger);
  } catch (...) {
    device.free(data_);
    throw;
  }
}

void TrackedMemory::count(Ledger& ledger) {
  try {
    ledger.add(tier_, kind_, tag_, bytes_);
  } catch (...) {  // add() counts the bytes even if it throws
    ledger.add(tier_, kind_, tag_, -bytes_);
    throw;
  }
  ledger_ = &ledger;
}

TrackedMemory::~TrackedMemory() {
  if (!data_) return;
  ledger_->add(tier_, kind_, tag_, -bytes_);
  if (device_) device_->free(data_);
}

TrackedMemory& TrackedMemory::operator=(TrackedMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(ledger_, other.ledger_);
  std::swap(tier_, other.tier_);
  std::swap(kind_, other.kind_);
  std::swap(tag_, other.tag_);
  return *this;
}

RegisteredMemory::RegisteredMemory(char* memory, int64_t bytes, std::vector<TierStore*> tiers)
    : memory_(memory), bytes_(bytes), tiers_(std::move(tiers)) {
  for (TierStore* tier : tiers_) tier->register_memory(memory_, bytes_);
}

RegisteredMemory::~RegisteredMemory() {
  for (TierStore* tier : tiers_) tier->unregister_memory(memory_, bytes_);
}

RegisteredMemory& RegisteredMemory::operator=(RegisteredMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  std::swap(tiers_, other.tiers_);
  return *this;
}

}  // namespace zr::host::offload
