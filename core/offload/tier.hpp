// One tier in use: its slots, transfers to and from them, and how long the host waited for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "base/trace.hpp"
#include "comm/done.hpp"
#include "plan/placement.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/offload.h"

namespace zr::host {

/// What a tier's plug-in says of itself, before or after it is open.
TierInfo tier_info_of(const Instance& tier);

/// What the first transfer of a tier that failed was told with; empty: none did. [any]
class TierFailure {
 public:
  void note(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = text;
  }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

/// A transfer under way. Memory it uses stays until it is over.
class Transfer {
 public:
  Transfer() = default;
  /// Takes over the reference to `done`. `what`: whose bytes they are, for errors.
  Transfer(const Instance& tier, zr_done* done, std::string what, std::shared_ptr<TierFailure> failure);
  ~Transfer();  // waits
  /// The other is none then, or this one's.
  Transfer(Transfer&& other) noexcept;
  Transfer& operator=(Transfer&& other) noexcept;
  /// Returns when it is over. Throws Failure(environment) with what the tier says of it, and whose bytes they are.
  void wait();
  bool is_over() const;
  zr_done* done() const { return done_; }

 private:
  const Instance* tier_ = nullptr;
  zr_done* done_ = nullptr;
  std::string what_;
  std::shared_ptr<TierFailure> failure_;  // of the tier
};

/// Calls on one thread at a time, but for counts.
class TierStore {
 public:
  /// Opens it. `index`: of the plan's places.
  TierStore(PluginHost& host, std::unique_ptr<Instance> instance, int index);
  ~TierStore();
  TierStore(const TierStore&) = delete;

  const TierInfo& info() const { return info_; }
  int index() const { return index_; }
  /// What a slot holds, for the ledger.
  struct LedgerEntry {
    MemoryKind kind;
    std::string tag;
    int64_t bytes;
  };
  /// A slot of that many bytes. Throws Failure(environment) with what the tier says, or what the ledger throws.
  uint64_t reserve(int64_t bytes, std::vector<LedgerEntry> held);
  void release(uint64_t slot);
  /// Memory of a slot, where info().in_memory().
  void* map(uint64_t slot);
  /// Starts to move [offset, offset + bytes) of a slot, all multiples of info().align. `what`: whose they are.
  Transfer read(uint64_t slot, int64_t offset, void* memory, int64_t bytes, const std::string& what);
  Transfer write(uint64_t slot, int64_t offset, const void* memory, int64_t bytes, const std::string& what);
  /// Memory that many transfers will use, until forget().
  void prepare(void* memory, int64_t bytes);
  void forget(void* memory, int64_t bytes);

  /// Transfers become spans of it; it outlives them. Null: none.
  void set_trace(Trace* trace) { trace_ = trace; }

  /// A transfer failed that somebody waited for: what stands here is not whole, whoever was told.
  bool failed() const { return !failure().empty(); }
  /// And what was said of the first; empty: none did.
  std::string failure() const { return failure_->text(); }
  int64_t read_bytes() const { return read_; }
  int64_t written_bytes() const { return written_; }
  const Instance& instance() const { return *instance_; }

 private:
  struct Allocation {
    uint64_t id;
    std::vector<LedgerEntry> held;
    bool mapped;
  };
  Transfer move(bool writes, uint64_t slot, int64_t offset, void* memory, int64_t bytes, const std::string& what);
  PluginHost& host_;
  std::unique_ptr<Instance> instance_;
  const zr_offload_api* api_;
  int index_;
  TierInfo info_;
  std::vector<Allocation> allocations_;
  std::atomic<int64_t> read_{0}, written_{0};
  std::shared_ptr<TierFailure> failure_ = std::make_shared<TierFailure>();
  Trace* trace_ = nullptr;
};

/// By index of the plan's places; null: the device, or a tier that is not used.
using Tiers = std::vector<std::unique_ptr<TierStore>>;

}  // namespace zr::host
