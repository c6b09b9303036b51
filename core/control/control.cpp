#include "control/control.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "base/error.hpp"
#include "base/forked.hpp"
#include "base/text.hpp"
#include "control/client.hpp"
#include "zr/mutex.hpp"

namespace zr::host::control {

namespace {
// A job with one rank and without zeroth's launcher: no sockets, no thread.
class SingleRankControl final : public Control {
 public:
  explicit SingleRankControl(std::string job) : job_(std::move(job)) {}
  int rank() const override { return 0; }
  int world() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_world() const override { return 1; }
  const std::string& job_id() const override { return job_; }
  void put(const std::string& key, const std::string& value) override {
    const MutexLock lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    MutexLock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&]() ZR_REQUIRES(mutex_) { return values_.count(key) > 0; }))
      throw PeerLostError(fmt::format("no rank has put '{}' into the job's store within {}", key,
                                      duration_text(static_cast<double>(timeout.count()) / 1000)));
    return values_[key];
  }
  void drop(const std::string& key) override {
    const MutexLock lock(mutex_);
    values_.erase(key);
  }
  void set_activity(const Activity&) override {}
  bool broken() const override { return false; }
  std::string report(const std::string& observation) override { return "rank 0: " + observation; }
  void on_broken(const void*, std::function<void()>) override {}
  void leave(int64_t, bool) override {}

 private:
  const std::string job_;
  Mutex mutex_;
  ConditionVariable changed_;
  std::map<std::string, std::string> values_ ZR_GUARDED_BY(mutex_);
};

// The process's membership in the job. It ends when the process exits, even if other code still holds the Control. A
// forked child must not touch the socket, which it shares with the parent, or the thread, which it does not have.
struct Membership {
  Mutex mutex;
  std::shared_ptr<Control> control ZR_GUARDED_BY(mutex);
  std::shared_ptr<ControlClient> client ZR_GUARDED_BY(mutex);
  OwnerProcess owner ZR_GUARDED_BY(mutex);

  ~Membership() {
    if (!client) return;
    if (owner.is_parent())
      new std::shared_ptr<ControlClient>(std::move(client));
    else
      client->close();
  }
};
}  // namespace

std::shared_ptr<Control> Control::alone() {
  return std::make_shared<SingleRankControl>(
      fmt::format("alone-{}-{}", getpid(), std::chrono::system_clock::now().time_since_epoch().count() % 1000000007));
}

std::shared_ptr<Control> Control::join(std::chrono::milliseconds timeout, const Rendezvous* given) {
  static Membership membership;  // destroyed: the process leaves the job when it exits
  const MutexLock lock(membership.mutex);
  if (membership.client && membership.owner.is_parent())
    fail_user(
        "a process made by fork() cannot join the job, of which its parent is a rank; create zr::Program and "
        "zr::Engine only in the process that the launcher has started");
  if (membership.control && !membership.owner.is_parent()) {
    const int rank = membership.control->rank(), world = membership.control->world();
    if (given && (given->rank != rank || given->world != world))
      fail_user(fmt::format(
          "zr::Rendezvous: it has rank {} of {}, but this process has joined its job as rank {} of {}: pass "
          "the same to each zr::Program",
          given->rank, given->world, rank, world));
    return membership.control;
  }
  const auto rank_info =
      find_rank_info([](const char* name) -> const char* { return std::getenv(name); }, getppid(), given);
  if (rank_info && (rank_info->world > 1 || rank_info->launched)) {
    membership.client = std::make_shared<ControlClient>(*rank_info, timeout);
    membership.control = membership.client;
  } else {
    membership.control = alone();
  }
  membership.owner = OwnerProcess();
  return membership.control;
}

}  // namespace zr::host::control
