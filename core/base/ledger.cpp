#include "base/ledger.hpp"

#include <algorithm>

namespace zr::host {

void Ledger::plan(Tier tier, MemoryKind kind, int64_t bytes) {
  const MutexLock lock(mutex_);
  entries_[{tier, kind}].planned += bytes;
  totals_[tier].planned += bytes;
}

void Ledger::add_locked(Tier tier, MemoryKind kind, std::string_view tag, int64_t bytes, int64_t peak) {
  const std::array<Entry*, 2> entries{&entries_[{tier, kind}], &totals_[tier]};  // what allocates is first
  auto at = tags_.find(tag);
  if (at == tags_.end()) at = tags_.emplace(std::string(tag), 0).first;
  for (Entry* const entry : entries) {
    const int64_t before = entry->now;
    entry->now += bytes;
    entry->peak = std::max({entry->peak, entry->now, before + peak});
  }
  at->second += bytes;
  if (at->second == 0) tags_.erase(at);
}

void Ledger::add(Tier tier, MemoryKind kind, std::string_view tag, int64_t bytes) {
  {
    const MutexLock lock(mutex_);
    add_locked(tier, kind, tag, bytes, bytes);
  }
  report_change(tier);
}

void Ledger::reserve(Tier tier, int64_t bytes) {
  {
    const MutexLock lock(mutex_);
    reserved_[tier] += bytes;
  }
  report_change(tier);
}

void Ledger::report_change(Tier tier) {
  std::function<void(int64_t)> changed;
  int64_t now = 0;
  {
    const MutexLock lock(mutex_);
    now = totals_[tier].now;
    if (const auto at = on_change_.find(tier); at != on_change_.end()) changed = at->second;
  }
  if (changed) changed(now);
}

void Ledger::observe(Tier tier, MemoryKind kind, std::string_view tag, int64_t now, int64_t peak) {
  const MutexLock lock(mutex_);
  const int64_t before = entries_[{tier, kind}].now;
  add_locked(tier, kind, tag, now - before, peak - before);
}

void Ledger::on_change(Tier tier, std::function<void(int64_t now)> changed) {
  const MutexLock lock(mutex_);
  on_change_[tier] = std::move(changed);
}

std::vector<Ledger::Row> Ledger::rows() const {
  const MutexLock lock(mutex_);
  std::vector<Row> rows;
  for (const auto& [key, entry] : entries_)
    if (entry.planned || entry.peak) rows.push_back({key.first, key.second, entry.planned, entry.now, entry.peak});
  return rows;
}

std::vector<std::pair<std::string, int64_t>> Ledger::holders() const {
  const MutexLock lock(mutex_);
  std::vector<std::pair<std::string, int64_t>> held(tags_.begin(), tags_.end());
  std::stable_sort(held.begin(), held.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return held;
}

int64_t Ledger::held(Tier tier, MemoryKind kind) const {
  const MutexLock lock(mutex_);
  const auto at = entries_.find({tier, kind});
  return at == entries_.end() ? 0 : at->second.now;
}

int64_t Ledger::held(Tier tier) const {
  const MutexLock lock(mutex_);
  const auto at = totals_.find(tier);
  return at == totals_.end() ? 0 : at->second.now;
}

int64_t Ledger::planned(Tier tier) const {
  const MutexLock lock(mutex_);
  const auto at = totals_.find(tier);
  return at == totals_.end() ? 0 : at->second.planned;
}

int64_t Ledger::reserved(Tier tier) const {
  const MutexLock lock(mutex_);
  const auto at = reserved_.find(tier);
  return at == reserved_.end() ? 0 : at->second;
}

int64_t Ledger::peak(Tier tier) const {
  const MutexLock lock(mutex_);
  const auto at = totals_.find(tier);
  return at == totals_.end() ? 0 : at->second.peak;
}

}  // namespace zr::host
