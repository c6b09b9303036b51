// What a part of the host has of tiers and of memory, given back when it goes, and when its maker fails halfway.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/ledger.hpp"
#include "base/page_memory.hpp"
#include "offload/tier.hpp"

namespace zr::host {

/// A slot of a tier. No transfer is under way with it when it goes.
class OwnedSlot {
 public:
  OwnedSlot() = default;
  /// As TierStore::reserve().
  OwnedSlot(TierStore& tier, int64_t bytes, std::vector<TierStore::Held> held)
      : tier_(&tier), id_(tier.reserve(bytes, std::move(held))) {}
  ~OwnedSlot() {
    if (tier_) tier_->release(id_);
  }
  OwnedSlot(OwnedSlot&& other) noexcept : tier_(std::exchange(other.tier_, nullptr)), id_(other.id_) {}
  OwnedSlot& operator=(OwnedSlot&& other) noexcept {
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
class CountedMemory {
 public:
  CountedMemory() = default;
  /// Zeroed page_memory(bytes, align). Throws Failure(environment) if there is none, or what the ledger throws.
  CountedMemory(int64_t bytes, int64_t align, Ledger& ledger, Tier tier, Kind kind, std::string tag);
  ~CountedMemory();
  CountedMemory(CountedMemory&& other) noexcept = default;
  /// The other has what this one had.
  CountedMemory& operator=(CountedMemory&& other) noexcept;
  char* data() const { return memory_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  PageMemory memory_;
  int64_t bytes_ = 0;
  Ledger* ledger_ = nullptr;
  Tier tier_ = Tier::host;
  Kind kind_ = Kind::staging;
  std::string tag_;
};

/// Tells tiers of memory that many transfers use (TierStore::prepare), for as long as it lives.
class Announced {
 public:
  Announced() = default;
  /// Refers to memory and tiers.
  Announced(char* memory, int64_t bytes, std::vector<TierStore*> tiers);
  ~Announced();
  Announced(Announced&& other) noexcept = default;
  /// The other has what this one had.
  Announced& operator=(Announced&& other) noexcept;

 private:
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
  std::vector<TierStore*> tiers_;
};

}  // namespace zr::host
