#include "offload/activation_store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "base/text.hpp"

namespace zr::host::offload {

namespace {

// Rounds up in steps of an eighth of a power of two, so that records of similar sizes can reuse allocations.
int64_t size_class(int64_t bytes, int64_t align) {
  int64_t step = align;
  while (step * 16 <= bytes) step *= 2;
  return round_up(bytes, step);
}

double since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
}  // namespace

ActivationStore::ActivationStore(TierStore& tier, Ledger& ledger, int64_t staging)
    : tier_(tier), part_capacity_(round_up(std::max<int64_t>(tier.info().io_bytes, 1), tier.info().align)) {
  if (tier_.info().in_memory()) return;
  const int64_t parts = std::max<int64_t>(staging / part_capacity_, 2);
  memory_ = TrackedMemory(parts * part_capacity_, tier.info().align, ledger, Tier::host, MemoryKind::staging,
                          "activations in flight");
  registered_ = RegisteredMemory(memory_.data(), memory_.bytes(), {&tier_});
  parts_.resize(static_cast<std::size_t>(parts));
  for (std::size_t i = 0; i < parts_.size(); ++i)
    parts_[i].memory = memory_.data() + static_cast<int64_t>(i) * part_capacity_;
}

ActivationStore::~ActivationStore() {
  parts_.clear();  // waits for transfers
}

std::string ActivationStore::name_of(const Record& record) const {
  return fmt::format("an activation of {} (offload.activations)", bytes_text(record.bytes));
}

ActivationStore::Record& ActivationStore::find(uint64_t record) {
  const auto at = records_.find(record);
  if (at == records_.end()) fail_internal(fmt::format("unknown activation record {}", record));
  return at->second;
}

bool ActivationStore::is_in_flight(uint64_t record) const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const StagingPart& part) { return part.record == record && !part.transfer.is_over(); });
}

// Makes the record's allocation free for other records, after its transfers.
void ActivationStore::recycle(uint64_t number) {
  for (StagingPart& part : parts_) {
    if (part.record != number) continue;
    try {
      wait(part);
    } catch (const std::exception& failure) {
      if (part.writes) failure_ = failure.what();
    }
    part.record = 0;
  }
  const auto at = records_.find(number);
  free_[at->second.capacity].push_back(std::move(at->second.allocation));
  records_.erase(at);
}

void ActivationStore::assign_allocation(Record& record) {
  std::erase_if(pending_release_, [&](uint64_t number) {
    const bool over = !is_in_flight(number);
    if (over) recycle(number);
    return over;
  });
  std::vector<TierAllocation>& available = free_[record.capacity];
  if (available.empty()) {
    const auto same = std::find_if(pending_release_.begin(), pending_release_.end(),
                                   [&](uint64_t number) { return records_.at(number).capacity == record.capacity; });
    if (same != pending_release_.end()) {
      recycle(*same);
      pending_release_.erase(same);
    }
  }
  if (!available.empty()) {
    record.allocation = std::move(available.back());
    available.pop_back();
    return;
  }
  try {
    TierAllocation allocation(tier_, record.capacity, {{MemoryKind::activations, "activations", record.capacity}});
    if (tier_.info().in_memory()) mapped_[allocation.id()] = static_cast<char*>(tier_.map(allocation.id()));
    record.allocation = std::move(allocation);
  } catch (const Error& failure) {
    fail_like(failure, fmt::format("{}; needed for {}", failure.what(), name_of(record)));
  }
  ++counts_.reserved;
}

int64_t ActivationStore::part_bytes(const Record& record, int64_t index) const {
  return std::min(part_capacity_, record.bytes - index * part_capacity_);
}

ActivationStore::StagingPart* ActivationStore::part_of(uint64_t record, int64_t index) {
  for (StagingPart& part : parts_)
    if (part.record == record && part.index == index) return &part;
  return nullptr;
}

void ActivationStore::wait(StagingPart& part) {
  if (!part.transfer.done()) return;
  const auto begin = std::chrono::steady_clock::now();
  try {
    part.transfer.wait();
  } catch (...) {
    part.record = 0;
    throw;
  }
  (part.writes ? counts_.write_wait : counts_.read_wait) += since(begin);
}

// An unused part; else a part whose data is on disk already, of the oldest record. That record must be older than
// `before`, because backward needs it later. Null if no part qualifies.
ActivationStore::StagingPart* ActivationStore::free_part(uint64_t before) {
  StagingPart* oldest = nullptr;
  for (StagingPart& part : parts_) {
    if (part.record == 0) return &part;
    if (part.writes && part.transfer.is_over() && part.record < before && (!oldest || part.record < oldest->record))
      oldest = &part;
  }
  if (!oldest) return nullptr;
  wait(*oldest);
  oldest->record = 0;
  return oldest;
}

// As free_part(), but also waits for transfers, and discards data that was read for another record.
ActivationStore::StagingPart& ActivationStore::evict(uint64_t number) {
  if (StagingPart* part = free_part(number)) return *part;
  StagingPart* oldest = nullptr;
  for (StagingPart& part : parts_)
    if (part.record != number && (!oldest || part.record < oldest->record)) oldest = &part;
  if (!oldest) oldest = &parts_.front();  // all parts belong to this record
  wait(*oldest);
  oldest->record = 0;
  return *oldest;
}

uint64_t ActivationStore::put(const void* data, int64_t bytes) {
  if (!failure_.empty()) fail_environment(std::exchange(failure_, {}));
  Record added{bytes, size_class(bytes, tier_.info().align), {}};
  assign_allocation(added);
  const uint64_t number = ++last_number_;
  const Record& record = records_.emplace(number, std::move(added)).first->second;
  ++counts_.put;
  if (tier_.info().in_memory()) {
    std::memcpy(mapped_[record.allocation.id()], data, static_cast<std::size_t>(bytes));
    return number;
  }
  try {
    for (int64_t i = 0, at = 0; at < bytes; ++i, at += part_capacity_) {
      StagingPart& part = evict(std::numeric_limits<uint64_t>::max());
      const int64_t n = part_bytes(record, i);
      std::memcpy(part.memory, static_cast<const char*>(data) + at, static_cast<std::size_t>(n));
      part.transfer =
          tier_.write(record.allocation.id(), at, part.memory, round_up(n, tier_.info().align), name_of(record));
      part.record = number;
      part.index = i;
      part.writes = true;
    }
  } catch (...) {
    drop(number);
    throw;
  }
  return number;
}

void ActivationStore::start_read(StagingPart& part, uint64_t number, const Record& record, int64_t index) {
  part.transfer = tier_.read(record.allocation.id(), index * part_capacity_, part.memory,
                             round_up(part_bytes(record, index), tier_.info().align), name_of(record));
  part.record = number;
  part.index = index;
  part.writes = false;
}

void ActivationStore::get(uint64_t number, void* to) {
  if (!failure_.empty()) fail_environment(std::exchange(failure_, {}));
  const Record& record = find(number);
  ++counts_.got;
  if (tier_.info().in_memory()) {
    std::memcpy(to, mapped_[record.allocation.id()], static_cast<std::size_t>(record.bytes));
    return;
  }
  const int64_t n = (record.bytes + part_capacity_ - 1) / part_capacity_;
  bool ready = true;
  for (int64_t i = 0, started = 0; i < n; ++i) {
    for (; started < n; ++started) {  // as many as there are free parts, and at least part i
      if (part_of(number, started)) continue;
      StagingPart* part = started == i ? &evict(number) : free_part(number);
      if (!part) break;
      start_read(*part, number, record, started);
      ready = false;
    }
    StagingPart* part = part_of(number, i);
    ready &= part->writes || part->transfer.is_over();
    if (!part->writes) wait(*part);  // during a write, the data in memory is complete
    std::memcpy(static_cast<char*>(to) + i * part_capacity_, part->memory,
                static_cast<std::size_t>(part_bytes(record, i)));
    if (!part->writes) part->record = 0;
  }
  counts_.ready += ready;
}

void ActivationStore::prefetch(const std::vector<uint64_t>& records) {
  if (tier_.info().in_memory()) return;
  for (const uint64_t number : records) {
    const Record& record = find(number);
    for (int64_t i = 0; i * part_capacity_ < record.bytes; ++i) {
      if (part_of(number, i)) continue;
      StagingPart* part = free_part(number);
      if (!part) return;
      start_read(*part, number, record, i);
    }
  }
}

void ActivationStore::drop(uint64_t number) noexcept {
  if (!records_.count(number)) return;
  is_in_flight(number) ? pending_release_.push_back(number) : recycle(number);
}

}  // namespace zr::host::offload
