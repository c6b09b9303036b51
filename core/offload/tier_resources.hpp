// What a part of the host has of tiers and of memory, given back when it goes, and when its maker fails halfway.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/huge_page_memory.hpp"
#include "base/ledger.hpp"
#include "offload/tier.hpp"

namespace zr::host {

/// A slot of a tier. No transfer is under way with it when it goes.
class TierAllocation {
 public:
  TierAllocation() = default;
  /// As TierStore::reserve().
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

/// Memory that is in the ledger for as long as it is there.
class TrackedMemory {
 public:
  TrackedMemory() = default;
  /// Zeroed allocate_huge_pages(bytes, align). Throws Failure(environment) if there is none, or what the ledger throws.
  TrackedMemory(int64_t bytes, int64_t align, Ledger& ledger, Tier tier, MemoryKind kind, std::string tag);
  ~TrackedMemory();
  TrackedMemory(TrackedMemory&& other) noexcept = default;
  /// The other has what this one had.
  TrackedMemory& operator=(TrackedMemory&& other) noexcept;
  char* data() const { return memory_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  HugePageMemory memory_;
  int64_t bytes_ = 0;
  Ledger* ledger_ = nullptr;
  Tier tier_ = Tier::host;
  MemoryKind kind_ = MemoryKind::staging;
  std::string tag_;
};

/// Tells tiers of memory that many transfers use (TierStore::prepare), for as long as it lives.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  /// Refers to memory and tiers.
  RegisteredMemory(char* memory, int64_t bytes, std::vector<TierStore*> tiers);
  ~RegisteredMemory();
  RegisteredMemory(RegisteredMemory&& other) noexcept = default;
  /// The other has what this one had.
  RegisteredMemory& operator=(RegisteredMemory&& other) noexcept;

 private:
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<TierStore*> tiers_;
};

}  // namespace zr::host
