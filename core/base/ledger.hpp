// The ledger: every long-lived byte of this rank, by tier and kind, planned and allocated. One per Engine.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace zr::host {

enum class Tier { device, host, disk };
enum class Kind { weights, gradients, master, slots, buckets, window, communicator, other };
inline constexpr std::array<std::string_view, 3> kTierNames{"device", "host", "disk"};
inline constexpr std::array<std::string_view, 8> kKindNames{"weights", "gradients", "master",       "slots",
                                                            "buckets", "window",    "communicator", "other"};

/// Thread-safe. Bytes are counted as allocated, alignment padding included.
class Ledger {
 public:
  struct Row {
    Tier tier;
    Kind kind;
    int64_t planned, now, peak;  // bytes
  };
  /// Notes what the plan foresees.
  void plan(Tier tier, Kind kind, int64_t bytes);
  /// Notes an allocation (bytes > 0) or a release (bytes < 0) under `tag`.
  void add(Tier tier, Kind kind, std::string_view tag, int64_t bytes);
  /// Rows that hold or planned anything, in tier and kind order.
  std::vector<Row> rows() const;
  /// Bytes held now by tag, largest first.
  std::vector<std::pair<std::string, int64_t>> holders() const;
  int64_t held(Tier tier, Kind kind) const;
  /// Sums over kinds.
  int64_t planned(Tier tier) const;
  int64_t peak(Tier tier) const;

 private:
  struct Cell {
    int64_t planned = 0, now = 0, peak = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::pair<Tier, Kind>, Cell> cells_;
  std::map<std::string, int64_t, std::less<>> tags_;
  std::map<Tier, Cell> totals_;
};

}  // namespace zr::host
