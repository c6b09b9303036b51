// RAII owners of tier allocations and memory, so that they are released also if a constructor throws.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/device_memory.hpp"
#include "base/huge_page_memory.hpp"
#include "base/ledger.hpp"
#include "offload/tier.hpp"

namespace zr::host::offload {

/// An allocation on a tier. No transfer may use it when it is destroyed.
class TierAllocation {
 public:
  TierAllocation() = default;
  /// Calls TierStore::reserve().
  TierAllocation(TierStore& tier, int64_t bytes, std::vector<TierStore::LedgerEntry> held)
      : tier_(&tier), id_(tier.reserve(bytes, std::move(held))) {}
  ~TierAllocation() {
    if (tier_) tier_->release(id_);
  }
  TierAllocation(TierAllocation&& other) noexcept : tier_(std::exchange(other.tier_, nullptr)), id_(other.id_) {}
  TierAllocation& operator=(TierAllocation&& other) noexcept {
    std::swap(tier_, other.tier_);
    std::swap(id_, other.id_);
    return *this;
  }
  uint64_t id() const { return id_; }

 private:
  TierStore* tier_ = nullptr;
  uint64_t id_ = 0;
};

/// Memory that is counted in the ledger during its lifetime.
class TrackedMemory {
 public:
  TrackedMemory() = default;
  /// Zeroed memory of allocate_huge_pages(bytes, align). Throws EnvironmentError if the allocation fails, or the
  /// ledger's exception.
  TrackedMemory(int64_t bytes, int64_t align, Ledger& ledger, Tier tier, MemoryKind kind, std::string tag);
  /// Zeroed memory of the device, which must outlive the object.
  TrackedMemory(int64_t bytes, DeviceMemory& device, Ledger& ledger, MemoryKind kind, std::string tag);
  ~TrackedMemory();
  TrackedMemory(TrackedMemory&& other) noexcept { *this = std::move(other); }
  /// Swaps the two objects.
  TrackedMemory& operator=(TrackedMemory&& other) noexcept;
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void count(Ledger& ledger);

  HugePageMemory memory_;           // of the host
  DeviceMemory* device_ = nullptr;  // whose memory it is; null: host memory
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  Ledger* ledger_ = nullptr;
  Tier tier_ = Tier::host;
  MemoryKind kind_ = MemoryKind::staging;
  std::string tag_;
};

/// Registers memory that many transfers use with tiers (TierStore::register_memory) during its lifetime.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  /// Keeps references to the memory and the tiers.
  RegisteredMemory(char* memory, int64_t bytes, std::vector<TierStore*> tiers);
  ~RegisteredMemory();
  RegisteredMemory(RegisteredMemory&& other) noexcept = default;
  /// Swaps the two objects.
  RegisteredMemory& operator=(RegisteredMemory&& other) noexcept;

 private:
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<TierStore*> tiers_;
};

}  // namespace zr::host::offload
