// The host that a plug-in sees while it is checked. It offers every service, watches how they are used, and keeps
// completions so that a late resolve is noticed.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "conform/memory.hpp"
#include "conform/simulated_device.hpp"
#include "conform/store.hpp"
#include "zr/abi/host.h"
#include "zr/mutex.hpp"

namespace zr::conform {

class TestHost;

/// A completion: the object behind a zr_done. It lives as long as the host.
class Completion {
 public:
  explicit Completion(TestHost& owner) : owner_(owner) {}
  zr_done* abi() { return reinterpret_cast<zr_done*>(this); }
  static Completion& from(zr_done* done) { return *reinterpret_cast<Completion*>(done); }
  TestHost& owner() const { return owner_; }
  /// Resolves it; reports a second resolve, and one that is forbidden.
  void resolve(zr_code code, int64_t native, const char* text);
  /// The call that got the completion has returned an error: resolving it now breaks the ABI.
  void forbid() { forbidden_ = true; }
  zr_code code() const { return code_.load(std::memory_order_acquire); }  // ZR_AGAIN: not resolved
  bool is_resolved() const { return code() != ZR_AGAIN; }
  int64_t native() const { return native_; }
  const std::string& text() const { return text_; }
  int times_resolved() const { return times_; }
  std::atomic<int> references{1};
  std::function<void()> on_resolve;  // called during the first resolve, on the thread that resolves

 private:
  TestHost& owner_;
  std::atomic<zr_code> code_{ZR_AGAIN};
  std::atomic<int> times_{0};
  std::atomic<bool> forbidden_{false};
  int64_t native_ = 0;
  std::string text_;
};

struct HostOptions {
  Mode mode{};
  std::set<std::string> absent{};  // ids of services that are not offered
  int rank = 0, world = 1;
  const Store* store = nullptr;       // null: an own one
  SimulatedDevice* device = nullptr;  // whose memory and streams it offers too; null: only CPU memory
};

/// The value of a key: the types of zr_config_service.
using KeyValue = std::variant<bool, int64_t, double, std::string, std::vector<double>>;
using KeyValues = std::map<std::string, KeyValue>;

/// What a zr_config points to.
struct ConfigTable {
  KeyValues values;
  TestHost* host = nullptr;
  bool ended = false;  // the call that got the config has returned
  const zr_config* abi() const { return reinterpret_cast<const zr_config*>(this); }
};

class TestHost {
 public:
  /// Offers all services but the absent ones.
  explicit TestHost(HostOptions options = {});
  ~TestHost();
  TestHost(const TestHost&) = delete;
  const zr_host* abi() const { return abi_; }
  const HostOptions& options() const { return options_; }
  /// A completion that lives as long as the host.
  Completion& new_completion();
  /// A table of values that lives as long as the host, so that a late read is noticed.
  ConfigTable& new_table(const KeyValues& values);
  /// The object lives as long as the host.
  void keep(std::shared_ptr<void> object) { kept_.push_back(std::move(object)); }
  /// Waits until the completion is resolved: by on_wait if it is set, else by polling. False after `seconds`.
  bool wait(Completion& completion, double seconds);
  std::function<zr_code(Completion&)> on_wait;  // advances the collectives that the completion may depend on
  /// What a plug-in can do and must not do; each is the subject of other rules.
  enum class Misuse {
    service,   // of a service or a completion
    worker,    // a call that a [worker] function must not make
    argument,  // use of an argument after the call has returned
    kCount
  };
  /// The first misuse of this kind; "" if none happened.
  std::string problem(Misuse kind = Misuse::service) const;
  void report(const std::string& problem, Misuse kind = Misuse::service);
  /// Bytes of the memory service that are not freed.
  int64_t allocated_bytes() const;
  /// From now on the tables of this host and their functions' host cannot be read.
  void withdraw_tables();
  /// True during a [worker] call on this thread.
  static thread_local bool in_worker_call;

 private:
  friend struct Services;
  struct Tables;
  template <class T>
  void offer(const std::string& id, T table);

  HostOptions options_;
  std::unique_ptr<Store> own_store_;
  std::string job_id_;
  std::vector<Pages> tables_;
  std::map<std::string, const void*> services_;
  zr_host* abi_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
  mutable Mutex mutex_;
  std::deque<std::unique_ptr<Completion>> completions_ ZR_GUARDED_BY(mutex_);
  std::deque<ConfigTable> configs_ ZR_GUARDED_BY(mutex_);
  std::map<void*, std::pair<std::unique_ptr<Array>, int64_t>> memory_ ZR_GUARDED_BY(mutex_);
  std::array<std::string, static_cast<std::size_t>(Misuse::kCount)> problems_ ZR_GUARDED_BY(mutex_);
};

}  // namespace zr::conform
