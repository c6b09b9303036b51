// The ledger: all long-lived bytes of this rank, by tier and kind, planned and allocated. One per Engine.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "zr/mutex.hpp"

namespace zr::host {

enum class Tier { device, host, disk };
enum class MemoryKind {
  weights,
  gradients,
  master,
  optimizer,
  buckets,
  all_gather,
  communicator,
  snapshot,
  staging,
  other,
  activations
};
inline constexpr std::array<std::string_view, 3> kTierNames{"device", "host", "disk"};
inline constexpr std::array<std::string_view, 11> kMemoryKindNames{"weights", "gradients",  "master",       "optimizer",
                                                                   "buckets", "all_gather", "communicator", "snapshot",
                                                                   "staging", "other",      "activations"};

/// Thread-safe. Bytes are counted as allocated, alignment padding included.
class Ledger {
 public:
  struct Row {
    Tier tier;
    MemoryKind kind;
    int64_t planned, now, peak;  // bytes
  };
  /// Adds planned bytes.
  void plan(Tier tier, MemoryKind kind, int64_t bytes);
  /// Records an allocation (bytes > 0) or a release (bytes < 0) under `tag`.
  void add(Tier tier, MemoryKind kind, std::string_view tag, int64_t bytes);
  /// Records bytes that another allocator counts for a kind: held now, and its peak.
  void observe(Tier tier, MemoryKind kind, std::string_view tag, int64_t now, int64_t peak);
  /// Adds to the bytes that will be allocated later (bytes < 0: subtracts), which budgets count as held.
  void reserve(Tier tier, int64_t bytes);
  /// Sets the callback that add() and reserve() call after every change of a tier, on the same thread, with the bytes
  /// that the tier then holds. Replaces the previous callback; an empty function removes it. The callback may throw.
  void on_change(Tier tier, std::function<void(int64_t now)> changed);
  /// Rows with held or planned bytes, ordered by tier and kind.
  std::vector<Row> rows() const;
  /// Bytes held now by tag, largest first.
  std::vector<std::pair<std::string, int64_t>> holders() const;
  /// Bytes held now. Without a kind, this and planned() and peak() are sums over all kinds.
  int64_t held(Tier tier, MemoryKind kind) const;
  int64_t held(Tier tier) const;
  int64_t planned(Tier tier) const;
  int64_t peak(Tier tier) const;
  /// The bytes that reserve() has added.
  int64_t reserved(Tier tier) const;

 private:
  struct Entry {
    int64_t planned = 0, now = 0, peak = 0;
  };
  void report_change(Tier tier);
  void add_locked(Tier tier, MemoryKind kind, std::string_view tag, int64_t bytes, int64_t peak) ZR_REQUIRES(mutex_);
  mutable Mutex mutex_;
  std::map<std::pair<Tier, MemoryKind>, Entry> entries_ ZR_GUARDED_BY(mutex_);
  std::map<std::string, int64_t, std::less<>> tags_ ZR_GUARDED_BY(mutex_);  // bytes held now
  std::map<Tier, Entry> totals_ ZR_GUARDED_BY(mutex_);
  std::map<Tier, int64_t> reserved_ ZR_GUARDED_BY(mutex_);
  std::map<Tier, std::function<void(int64_t)>> on_change_ ZR_GUARDED_BY(mutex_);
};

}  // namespace zr::host
