// A control plane for the forked ranks of one test: a block of shared memory in place of sockets.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "control/control.hpp"
#include "zr/mutex.hpp"

namespace zr::testing {

/// The state that the ranks share; create it before the ranks are forked.
class SharedJob {
 public:
  static constexpr int kRanks = 8, kKeys = 256;
  struct Entry {
    char key[96];
    uint32_t bytes;
    char value[1500];
  };
  struct Page {
    std::atomic<int> lock{0};
    std::atomic<int> entries{0};
    std::atomic<bool> broken{false};
    char headline[512] = {};
    char doing[kRanks][256] = {};
    std::atomic<int64_t> activities[kRanks] = {};
    Entry table[kKeys];
  };
  SharedJob()
      : page_(new (::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Page) {}
  ~SharedJob() { ::munmap(page_, sizeof(Page)); }
  SharedJob(const SharedJob&) = delete;
  Page& page() const { return *page_; }
  void break_job(const std::string& headline) const {
    if (page_->broken) return;
    std::snprintf(page_->headline, sizeof page_->headline, "%s", headline.c_str());
    page_->broken = true;
  }

 private:
  Page* page_;
};

/// The control plane of one rank, on a SharedJob.
class SharedControl : public host::control::Control {
 public:
  SharedControl(const SharedJob& job, int rank, int world)
      : job_(job), rank_(rank), world_(world), watch_([this](std::stop_token stop) { watch(stop); }) {}
  int rank() const override { return rank_; }
  int world() const override { return world_; }
  int local_rank() const override { return rank_; }
  int local_world() const override { return world_; }
  const std::string& job_id() const override { return id_; }

  void put(const std::string& key, const std::string& value) override {
    const std::string kept = change ? change(key, value) : value;
    if (key.size() >= sizeof(SharedJob::Entry::key) || kept.size() > sizeof(SharedJob::Entry::value))
      throw std::runtime_error("the key or the value is too long");
    SharedJob::Page& page = job_.page();
    while (page.lock.exchange(1)) std::this_thread::yield();
    SharedJob::Entry& entry = page.table[page.entries];
    std::snprintf(entry.key, sizeof entry.key, "%s", key.c_str());
    entry.bytes = static_cast<uint32_t>(kept.size());
    std::memcpy(entry.value, kept.data(), kept.size());
    ++page.entries;
    page.lock = 0;
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!broken() && std::chrono::steady_clock::now() < deadline) {
      for (int i = job_.page().entries; i-- > 0;)
        if (key == job_.page().table[i].key) return {job_.page().table[i].value, job_.page().table[i].bytes};
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    throw PeerLostError(broken() ? job_.page().headline : "no rank has put '" + key + "'");
  }
  void drop(const std::string&) override {}
  void set_activity(const host::control::Activity& activity) override {
    std::snprintf(job_.page().doing[rank_], sizeof job_.page().doing[rank_], "%llu %s%s",
                  static_cast<unsigned long long>(activity.sequence), activity.waiting ? "waiting in " : "",
                  activity.what.c_str());
    ++job_.page().activities[rank_];
  }
  bool broken() const override { return job_.page().broken.load(std::memory_order_relaxed); }
  std::string report(const std::string& observation) override {
    job_.break_job(observation);
    std::string text = job_.page().headline;
    for (int r = 0; r < world_; ++r) text += "\n  rank " + std::to_string(r) + ": " + job_.page().doing[r];
    return text + "\n  this rank: " + observation;
  }
  void on_broken(const void*, std::function<void()> callback) override {
    const MutexLock lock(mutex_);
    callback_ = std::move(callback);
  }
  void leave(int64_t, bool) override {}

  /// If set, replaces every value that this rank puts: simulates a rank that reports something else.
  std::function<std::string(const std::string& key, const std::string& value)> change;

 private:
  void watch(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const MutexLock lock(mutex_);
      if (broken() && callback_) std::exchange(callback_, nullptr)();
    }
  }
  const SharedJob& job_;
  int rank_, world_;
  std::string id_ = "test";
  Mutex mutex_;
  std::function<void()> callback_ ZR_GUARDED_BY(mutex_);
  std::jthread watch_;
};

}  // namespace zr::testing
