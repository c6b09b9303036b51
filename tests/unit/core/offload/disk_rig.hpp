// A simulated disk that a test can make full or busy and whose transfers it can count, and a host that uses it.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/comm_runtime.hpp"
#include "offload/tier.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/offload.hpp"

#pragma GCC visibility push(hidden)  // as in the headers of sdk/
namespace zr::test {

inline constexpr int64_t kBlock = 4096;

/// The contents and the requested behavior of all simulated disks of this process.
struct DiskState {
  std::mutex mutex;
  int reserves_left = 1 << 30;  // afterwards the disk is full
  bool busy = false;            // transfers begin, and end in finish()
  std::map<uint64_t, std::vector<char>> slots;
  std::vector<std::pair<char*, int64_t>> announced;
  std::string wrong;  // a violation of the contract by the host
  struct Waiting {
    bool writes;
    zr_transfer what;
    Done done;
  };
  std::list<Waiting> waiting;

  void move(bool writes, const zr_transfer& what) {
    char* const bytes = slots.at(what.allocation).data() + what.offset;
    char* const memory = static_cast<char*>(what.memory.data);
    std::memcpy(writes ? bytes : memory, writes ? memory : bytes, static_cast<std::size_t>(what.memory.count));
  }
  void finish() {
    std::list<Waiting> all;
    {
      const std::lock_guard lock(mutex);
      busy = false;
      all.swap(waiting);
      for (const Waiting& one : all) move(one.writes, one.what);
    }
    for (const Waiting& one : all) one.done.resolve();
  }
  bool is_used(const char* memory, int64_t bytes) const {
    for (const Waiting& one : waiting) {
      const char* const at = static_cast<const char*>(one.what.memory.data);
      if (at < memory + bytes && memory < at + one.what.memory.count) return true;
    }
    return false;
  }
};
inline DiskState disk;

class Disk : public Offload<Disk> {
 public:
  explicit Disk(const Host& host) : host_(host) {}
  zr_offload_caps caps() const {
    zr_offload_caps caps{};
    caps.flags = ZR_TIER_ASYNC;
    caps.io_align = caps.io_bytes = kBlock;
    caps.io_depth = 2;
    caps.device_types = 2;
    return caps;
  }
  uint64_t reserve(uint64_t bytes, const char*) {
    if (disk.reserves_left-- <= 0) throw PluginError(ZR_IO, "the disk is full");
    disk.slots[++last_].resize(bytes);
    return last_;
  }
  void release(uint64_t slot) noexcept {
    for (const auto& one : disk.waiting)
      if (one.what.allocation == slot) disk.wrong = "an allocation was released during a transfer";
    disk.slots.erase(slot);
  }
  void write(const zr_transfer* all, uint32_t n, zr_stream*, zr_done* done) { start(true, all, n, done); }
  void read(const zr_transfer* all, uint32_t n, zr_stream*, zr_done* done) { start(false, all, n, done); }
  void reg(const zr_view& memory) { disk.announced.emplace_back(static_cast<char*>(memory.data), memory.count); }
  void unreg(const zr_view& memory) noexcept {
    if (disk.is_used(static_cast<char*>(memory.data), memory.count))
      disk.wrong = "memory was released during a transfer";
    std::erase(disk.announced, std::pair(static_cast<char*>(memory.data), memory.count));
  }

 private:
  void start(bool writes, const zr_transfer* all, uint32_t n, zr_done* done) {
    Done kept = Done::retained(host_, done);
    const std::lock_guard lock(disk.mutex);
    if (n != 1) throw PluginError(ZR_INVALID, "one at a time");
    if (disk.busy) return static_cast<void>(disk.waiting.push_back({writes, *all, std::move(kept)}));
    disk.move(writes, *all);
    kept.resolve();
  }
  const Host host_;
  uint64_t last_ = 0;
};

/// A single rank with parameters, reduced gradients and optimizer states; the latter two are on the disk.
class DiskRig {
 public:
  DiskRig() {
    disk.reserves_left = 1 << 30;
    disk.busy = false;
    disk.wrong.clear();
    host::comm::offer_async(host_);
    static constexpr zr_component table = component<Disk>("disk", "1.0.0");
    static constexpr const zr_component* list[] = {&table};
    static constexpr zr_module module{
        sizeof(zr_module), ZR_ABI_MINOR, ZR_ABI_MINOR, "disk", "tests", "1.0.0", "", list, 1, 0, nullptr, nullptr};
    tiers.resize(1);
    tiers.push_back(std::make_unique<host::offload::TierStore>(
        host_,
        std::make_unique<host::plugin::Instance>(host_, host::plugin::Component{&table, &module, "disk"}, config_,
                                                 "offload.disk"),
        1));
    comm = std::make_unique<host::comm::CommRuntime>(host_, host::control::Control::join(std::chrono::seconds(1)),
                                                     nullptr, host::comm::CommRuntime::Options{});
    held_ = ledger.held(host::Tier::host);
  }
  /// `counts`: elements per parameter. A part of the states stays on the device.
  host::plan::MemoryPlan plan(const std::vector<int64_t>& counts) const {
    host::plan::PlanInput in;
    for (std::size_t i = 0; i < counts.size(); ++i)
      in.parameters.push_back({"p" + std::to_string(i), {}, {counts[i]}, counts[i], false, 0});
    in.descriptions[0].slots = {{"m", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}, {"v", ZR_F32, ZR_SLOT_LIKE_PARAM, 0, 0}};
    in.tiers.push_back(tiers[1]->info());
    in.tier_request.states = in.tier_request.reduced_gradients = 1;
    in.tier_request.device_fraction = 0.4;
    return host::plan::make_plan(in, 0, [](const zr_plan_in& given, const zr_plan_sink& sink) {
      const auto aligned = [&](int64_t count) { return (count + given.align - 1) / given.align * given.align; };
      int64_t elements = 0;
      for (uint32_t p = 0; p < given.n_params; ++p) elements += aligned(given.params[p]->count);
      for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD}) {
        const zr_buffer buffer{sizeof(zr_buffer), role,   role == ZR_ROLE_REDUCED_GRAD ? "sums" : "weights",
                               elements,          ZR_F32, 0};
        sink.buffer(sink.ctx, &buffer);
      }
      for (const uint32_t role : {ZR_ROLE_WEIGHT, ZR_ROLE_REDUCED_GRAD})
        for (uint32_t p = 0, at = 0; p < given.n_params; ++p) {
          const int64_t count = given.params[p]->count;
          const zr_piece piece{sizeof(zr_piece), role, p, role == ZR_ROLE_REDUCED_GRAD ? 1u : 0u, 0, count, at};
          sink.piece(sink.ctx, &piece);
          at += static_cast<uint32_t>(aligned(count));
        }
    });
  }
  /// Checks that a host component that was destroyed, or failed to start, has released everything.
  void expect_nothing_left() const {
    EXPECT_EQ(ledger.held(host::Tier::device), 0);
    EXPECT_EQ(ledger.held(host::Tier::host), held_);
    EXPECT_EQ(ledger.held(host::Tier::disk), 0);
    EXPECT_TRUE(disk.slots.empty());
    EXPECT_TRUE(disk.announced.empty());
    EXPECT_EQ(disk.wrong, "");
  }
  /// Calls `make` with an increasing memory limit until it succeeds; returns the number of failures.
  template <class Make>
  int fails_for_memory(host::Tier tier, Make&& make) {
    int times = 0;
    for (int64_t allowed = 0;; ++allowed) {
      int64_t left = allowed, before = ledger.held(tier);
      ledger.on_change(tier, [&](int64_t now) {
        if (now > before && left-- == 0) host::fail_environment("over the budget");
        before = now;
      });
      bool made = true;
      try {
        make();
      } catch (const Error& failure) {
        EXPECT_STREQ(failure.what(), "over the budget");
        made = false;
      }
      ledger.on_change(tier, {});
      expect_nothing_left();
      if (made) return times;
      ++times;
    }
  }

  host::Ledger ledger;

 private:
  host::ThreadPool pool_{1};
  host::plugin::PluginHost host_{ledger, pool_};
  host::config::JobConfig config_;
  int64_t held_ = 0;

 public:
  host::offload::Tiers tiers;
  std::unique_ptr<host::comm::CommRuntime> comm;
};

}  // namespace zr::test
#pragma GCC visibility pop
