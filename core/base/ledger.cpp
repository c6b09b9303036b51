#include "base/ledger.hpp"

#include <algorithm>

namespace zr::host {

void Ledger::plan(Tier tier, Kind kind, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  cells_[{tier, kind}].planned += bytes;
  totals_[tier].planned += bytes;
}

void Ledger::add(Tier tier, Kind kind, std::string_view tag, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  for (Cell* cell : {&cells_[{tier, kind}], &totals_[tier]}) {
    cell->now += bytes;
    cell->peak = std::max(cell->peak, cell->now);
  }
  auto at = tags_.find(tag);
  if (at == tags_.end()) at = tags_.emplace(std::string(tag), 0).first;
  if ((at->second += bytes) == 0) tags_.erase(at);
}

std::vector<Ledger::Row> Ledger::rows() const {
  const std::lock_guard lock(mutex_);
  std::vector<Row> rows;
  for (const auto& [key, cell] : cells_)
    if (cell.planned || cell.peak) rows.push_back({key.first, key.second, cell.planned, cell.now, cell.peak});
  return rows;
}

std::vector<std::pair<std::string, int64_t>> Ledger::holders() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::string, int64_t>> held(tags_.begin(), tags_.end());
  std::stable_sort(held.begin(), held.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return held;
}

int64_t Ledger::held(Tier tier, Kind kind) const {
  const std::lock_guard lock(mutex_);
  const auto at = cells_.find({tier, kind});
  return at == cells_.end() ? 0 : at->second.now;
}

int64_t Ledger::planned(Tier tier) const {
  const std::lock_guard lock(mutex_);
  const auto at = totals_.find(tier);
  return at == totals_.end() ? 0 : at->second.planned;
}

int64_t Ledger::peak(Tier tier) const {
  const std::lock_guard lock(mutex_);
  const auto at = totals_.find(tier);
  return at == totals_.end() ? 0 : at->second.peak;
}

}  // namespace zr::host
