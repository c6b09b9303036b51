// One open tier: its allocations, and transfers to and from them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "base/trace.hpp"
#include "comm/done.hpp"
#include "offload/tier_health.hpp"
#include "plan/placement.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/abi/offload.h"

namespace zr::host::offload {

/// The capabilities that a tier's plug-in reports, before or after open().
plan::TierInfo tier_info_of(const plugin::Instance& tier);

/// A transfer in progress. The memory that it reads or writes must stay valid until is_over() returns true or wait()
/// returns.
class Transfer {
 public:
  Transfer() = default;
  /// Takes over the reference to `done`. `what` names the data in errors.
  Transfer(const plugin::Instance& tier, zr_done* done, std::string what, std::shared_ptr<TierHealth> health);
  ~Transfer();  // waits
  /// Leaves `other` empty.
  Transfer(Transfer&& other) noexcept;
  /// Swaps the two transfers.
  Transfer& operator=(Transfer&& other) noexcept;
  /// Returns when the transfer is over. If it failed, throws the Error that the tier's code means (check()), with the
  /// data's name.
  void wait();
  bool is_over() const;
  zr_done* done() const { return done_; }

 private:
  const plugin::Instance* tier_ = nullptr;
  zr_done* done_ = nullptr;
  std::string what_;
  std::shared_ptr<TierHealth> health_;
};

/// One caller at a time. Exceptions: any thread may call read(), write(), read_bytes(), written_bytes(), failed() and
/// failure().
class TierStore {
 public:
  /// Opens the tier. `index`: its position in the plan's list of tiers. A warning is logged if a wait for a transfer
  /// takes longer than `long_wait`.
  TierStore(plugin::PluginHost& host, std::shared_ptr<const plugin::Instance> instance, int index,
            std::chrono::milliseconds long_wait = std::chrono::minutes(1));
  ~TierStore();
  TierStore(const TierStore&) = delete;

  const plan::TierInfo& info() const { return info_; }
  int index() const { return index_; }
  /// What an allocation contains, for the ledger.
  struct LedgerEntry {
    MemoryKind kind;
    std::string tag;
    int64_t bytes;
  };
  /// Reserves an allocation of that many bytes and returns its id. Throws the Error that the tier's code means, or the
  /// ledger's exception.
  uint64_t reserve(int64_t bytes, std::vector<LedgerEntry> entries);
  void release(uint64_t allocation);
  /// The memory of an allocation; requires info().in_memory().
  void* map(uint64_t allocation);
  /// Starts to transfer bytes [offset, offset + bytes) of an allocation, all multiples of info().align. `what` names
  /// the data in errors.
  Transfer read(uint64_t allocation, int64_t offset, void* memory, int64_t bytes, const std::string& what);
  Transfer write(uint64_t allocation, int64_t offset, const void* memory, int64_t bytes, const std::string& what);
  /// Registers memory that many transfers will use, until unregister_memory().
  void register_memory(void* memory, int64_t bytes);
  void unregister_memory(void* memory, int64_t bytes);

  /// Records transfers as spans of `trace`, which must outlive them. Null: no trace.
  void set_trace(Trace* trace) { trace_ = trace; }

  /// True if a transfer could not be started, or wait() found that one failed: data on this tier is incomplete.
  bool failed() const { return !failure().empty(); }
  /// The error of the first failed transfer; empty if none failed.
  std::string failure() const { return health_->failure(); }
  int64_t read_bytes() const { return read_; }
  int64_t written_bytes() const { return written_; }
  const plugin::Instance& instance() const { return *instance_; }

 private:
  struct Allocation {
    uint64_t id;
    int64_t bytes;
    std::vector<LedgerEntry> entries;
    bool mapped;
  };
  Transfer start(bool writes, uint64_t allocation, int64_t offset, void* memory, int64_t bytes,
                 const std::string& what);
  plugin::PluginHost& host_;
  const std::shared_ptr<const plugin::Instance> instance_;
  const zr_offload_api* api_;
  int index_;
  plan::TierInfo info_;
  std::vector<Allocation> allocations_;
  std::atomic<int64_t> read_{0}, written_{0};
  std::shared_ptr<TierHealth> health_;
  Trace* trace_ = nullptr;
};

/// By index of the plan's tiers; null for the device and for tiers that are not used.
using Tiers = std::vector<std::unique_ptr<TierStore>>;

}  // namespace zr::host::offload
