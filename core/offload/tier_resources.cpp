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
  std::memset(memory_.get(), 0, static_cast<std::size_t>(size));
  try {
    ledger.add(tier, kind, tag_, bytes);
  } catch (...) {  // add() counts the bytes even if it throws
    ledger.add(tier, kind, tag_, -bytes);
    throw;
  }
  ledger_ = &ledger;
}

TrackedMemory::~TrackedMemory() {
  if (memory_) ledger_->add(tier_, kind_, tag_, -bytes_);
}

TrackedMemory& TrackedMemory::operator=(TrackedMemory&& other) noexcept {
  std::swap(memory_, other.memory_);
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
