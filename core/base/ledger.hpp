// The ledger: every long-lived byte of this rank, by tier and kind, planned and allocated. One per Engine.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace zr::host {

enum class Tier { device, host, disk };
enum class MemoryKind {
  weights,
  gradients,
  master,
  slots,
  buckets,
  gather_buffer,
  communicator,
  snapshot,
  staging,
  other,
  activations
};
inline constexpr std::array<std::string_view, 3> kTierNames{"device", "host", "disk"};
inline constexpr std::array<std::string_view, 11> kMemoryKindNames{"weights", "gradients", "master",       "slots",
                                                                   "buckets", "window",    "communicator", "snapshot",
                                                                   "staging", "other",     "activations"};

/// Thread-safe. Bytes are counted as allocated, alignment padding included.
class Ledger {
 public:
  struct Row {
    Tier tier;
    MemoryKind kind;
    int64_t planned, now, peak;  // bytes
  };
  /// Notes what the plan foresees.
  void plan(Tier tier, MemoryKind kind, int64_t bytes);
  /// Notes an allocation (bytes > 0) or a release (bytes < 0) under `tag`.
  void add(Tier tier, MemoryKind kind, std::string_view tag, int64_t bytes);
  /// Notes what someone else counts under a kind: what it holds now, and held at most.
  void observe(Tier tier, MemoryKind kind, std::string_view tag, int64_t now, int64_t peak);
  /// Called after every add() to a tier, on the same thread, with what the tier then holds; replaces the one before,
  /// empty: none. May throw.
  void on_change(Tier tier, std::function<void(int64_t now)> changed);
  /// Rows that hold or planned anything, in tier and kind order.
  std::vector<Row> rows() const;
  /// Bytes held now by tag, largest first.
  std::vector<std::pair<std::string, int64_t>> holders() const;
  /// Bytes held now; without a kind, as planned() and peak(), the sum over kinds.
  int64_t held(Tier tier, MemoryKind kind) const;
  int64_t held(Tier tier) const;
  int64_t planned(Tier tier) const;
  int64_t peak(Tier tier) const;

 private:
  struct Entry {
    int64_t planned = 0, now = 0, peak = 0;
  };
  void add_locked(Tier tier, MemoryKind kind, std::string_view tag, int64_t bytes, int64_t peak);  // locked
  mutable std::mutex mutex_;
  std::map<std::pair<Tier, MemoryKind>, Entry> entries_;
  std::map<std::string, int64_t, std::less<>> tags_;
  std::map<Tier, Entry> totals_;
  std::map<Tier, std::function<void(int64_t)>> changed_;
};

}  // namespace zr::host
