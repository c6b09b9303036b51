// The store's view of the job, without sockets: the ranks, the state of each rank, and whether the job has failed.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/failure_report.hpp"
#include "control/protocol.hpp"

namespace zr::host::control {

/// Single-threaded. Every event may make the job fail: check broken() after each call. `now` must never decrease.
class Members {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// `launched`: ended() will be called for every rank. `machine`: the machine of the store, whose /proc can be read.
  Members(int world, bool launched, std::string machine);

  /// Call when the launcher has started the rank's process.
  void started(int rank, int64_t pid);
  /// Adds the rank that a process claims in its join request. Returns "", or why the process cannot have this rank.
  std::string admit(const protocol::JoinRequest& request, Time now);
  /// Remembers why a process could not join, for the report that ranks are missing.
  void refused(const std::string& reason);
  void on_heartbeat(int rank, const protocol::Heartbeat& heartbeat, Time now);
  /// Call for the heartbeat with which a rank answers the failure notice, instead of on_heartbeat().
  void on_final_status(int rank, const protocol::Heartbeat& heartbeat, Time now);
  void reported(int rank, const std::string& text);
  void disconnected(int rank);
  /// Checks the processes of ranks that have been silent for 1 s: after a rank dies, a child that it forked may keep
  /// the connection open.
  void detect_dead_ranks(Time now);
  /// Checks whether all ranks still wait seconds after the process of a rank ended normally, which cannot help them:
  /// they wait for a key, or for a collective that the process may have left unfinished. Call it often.
  void detect_endless_waits(Time now);
  void ended(int rank, int64_t pid, const ExitStatus& exit_status);

  bool all_joined() const;
  bool joined(int rank) const { return at(rank).joined; }
  std::vector<protocol::Peer> peers() const;
  /// The pid of a connected rank on the store's machine; else 0.
  int64_t process_of(int rank) const;
  /// For how long the most silent rank has sent nothing, of those that are connected and have not left.
  int64_t longest_silence_ms(Time now) const;
  bool broken() const { return cause_ != Cause::none; }
  /// True if the report can be written: the origin of the failure is known, the surviving ranks have answered or have
  /// been silent for 2 s, and the exit statuses of the lost ranks are known.
  bool report_is_ready(Time since, Time now) const;
  /// True if the rank is connected, but has neither answered the failure notice nor sent anything for 2 s.
  bool has_long_been_silent(int rank, Time now) const;
  /// Call for every message of a rank.
  void on_message(int rank, Time now) { at(rank).heard = now; }
  /// Why the job failed: the notice sent before the ranks have answered; with their answers, the first line of the
  /// report, and the full report.
  std::string failure_notice() const;
  std::string headline(Time now) const;
  std::string failure_report(Time now) const;

 private:
  /// In ascending priority. follows: a rank ended because of another rank, as its exit code says; the origin is not
  /// known yet.
  enum class Cause { none, follows, reported, left, mismatch, lost };
  struct Member {
    bool joined = false, connected = false, answered = false;
    protocol::Peer peer;
    protocol::Heartbeat heartbeat;
    Time heard{};
    std::optional<Time> ended_at;  // when detect_endless_waits() found that the process had ended normally
    std::optional<ExitStatus> exit_status;
    std::string reported_text;
  };
  struct FirstIssue {
    int rank;
    uint64_t fingerprint;
    std::string what;
  };
  Member& at(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  const Member& at(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  int world() const { return static_cast<int>(members_.size()); }
  void record_cause(Cause cause, int rank, std::string text);
  void compare(int rank, const protocol::Heartbeat& heartbeat);
  std::string waited_for_departed(int departed, int waiting) const;
  void detect_waits_on_departed();
  bool waits_for_departed(const Member& waiting, const Member& other) const;
  int find_ended(Time now);
  bool silent(int rank) const;  // connected, but it has not answered the failure notice
  std::string silence_text(int rank, Time now) const;
  std::string loss_reason(int rank) const;
  std::string status_text(int rank, Time now) const;
  std::string state_of_other_ranks(Time now) const;

  const bool launched_;
  const std::string machine_;
  std::vector<Member> members_;
  int departed_ = 0;  // ranks that left at least once
  std::map<std::pair<uint64_t, uint64_t>, FirstIssue>
      first_issues_;  // by (leaves, sequence): the rank that issued it first
  Cause cause_ = Cause::none;
  int cause_rank_ = 0;
  std::string cause_text_;
  int64_t refusals_ = 0;  // requests to join
  std::string last_refusal_;
};

}  // namespace zr::host::control
