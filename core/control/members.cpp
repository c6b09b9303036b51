#include "control/members.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.hpp"
#include "control/call_mismatch.hpp"
#include "zr/error.hpp"

namespace zr::host::control {

namespace {
constexpr std::size_t kMaxIssued = 4096;
constexpr auto kReportGrace = std::chrono::milliseconds(200);
constexpr auto kSilence = std::chrono::seconds(1);
constexpr auto kLongSilence = std::chrono::seconds(2);
constexpr int64_t kLongGetMs = 2000;
constexpr int64_t kLongCollectiveMs = 5000;  // a collective may take that long after one rank has finished its part

int64_t ms_between(Members::Time from, Members::Time to) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(to - from).count();
}
}  // namespace

Members::Members(int world, bool launched, std::string machine)
    : launched_(launched), machine_(std::move(machine)), members_(static_cast<std::size_t>(world)) {}

void Members::started(int rank, int64_t pid) { at(rank).peer.pid = pid; }

std::string Members::admit(const protocol::JoinRequest& request, Time now) {
  if (request.world != world())
    return fmt::format("rank {} expects {} ranks, but the job has {}: start all ranks with one launcher command",
                       request.rank, request.world, world());
  if (request.rank < 0 || request.rank >= world())
    return fmt::format("rank {} is out of range (world size {})", request.rank, world());
  Member& member = at(static_cast<int>(request.rank));
  if (member.joined)
    return fmt::format("{} has joined already, but pid {} on {} has the same rank: give each process its own rank",
                       rank_text(static_cast<int>(request.rank), member.peer.pid), request.peer.pid, request.peer.host);
  member.joined = member.connected = true;
  member.peer = request.peer;
  member.heard = now;
  member.heartbeat.activity.what = "join";
  member.heartbeat.activity.waiting = true;
  for (int rank = 0; rank < world(); ++rank)
    if (at(rank).exit_status && !at(rank).joined) record_cause(Cause::lost, rank, "");
  return "";
}

void Members::refused(const std::string& reason) {
  ++refusals_;
  last_refusal_ = reason;
}

void Members::on_heartbeat(int rank, const protocol::Heartbeat& heartbeat, Time now) {
  Member& member = at(rank);
  if (member.heartbeat.leaves == 0 && heartbeat.leaves > 0) ++departed_;
  compare(rank, heartbeat);
  member.heartbeat = heartbeat;
  member.heartbeat.recent.clear();
  member.heard = now;
  if (departed_ > 0) detect_waits_on_departed();
}

void Members::on_final_status(int rank, const protocol::Heartbeat& heartbeat, Time now) {
  on_heartbeat(rank, heartbeat, now);
  at(rank).answered = true;
}

void Members::reported(int rank, const std::string& text) {
  at(rank).reported_text = text;
  record_cause(Cause::reported, rank, text);
}

void Members::disconnected(int rank) {
  Member& member = at(rank);
  member.connected = false;
  if (!member.heartbeat.left) return record_cause(Cause::lost, rank, "");
  detect_waits_on_departed();
}

void Members::detect_dead_ranks(Time now) {
  for (int rank = 0; rank < world(); ++rank) {
    const Member& member = at(rank);
    if (member.connected && now - member.heard > kSilence && member.peer.machine == machine_ &&
        protocol::is_dead(member.peer.pid))
      disconnected(rank);
  }
}

// Returns a rank whose process has ended normally, or -1. Prefers a rank that exited, because it may have left a
// collective unfinished.
int Members::find_ended(Time now) {
  int found = -1;
  for (int rank = 0; rank < world(); ++rank) {
    Member& member = at(rank);
    if (member.connected || !member.heartbeat.left || member.heartbeat.failed) continue;
    if (!member.ended_at) member.ended_at = now;
    if (found < 0 || (member.heartbeat.exited && !at(found).heartbeat.exited)) found = rank;
  }
  return found;
}

void Members::detect_endless_waits(Time now) {
  const int departed = find_ended(now);
  if (departed < 0) return;
  const Member& ended = at(departed);
  int waiting = -1;
  for (int rank = 0; rank < world(); ++rank) {
    const Member& member = at(rank);
    if (!member.connected || member.heartbeat.left) continue;
    if (!member.heartbeat.activity.waiting || now - member.heard > kSilence) return;  // it may still help the others
    if (!member.heartbeat.awaits_key && !ended.heartbeat.exited) return;              // detect_waits_on_departed()
    const int64_t waited_ms = member.heartbeat.age_ms + ms_between(member.heard, now);
    if (std::min(waited_ms, ms_between(*ended.ended_at, now)) <
        (member.heartbeat.awaits_key ? kLongGetMs : kLongCollectiveMs))
      return;
    waiting = rank;
  }
  if (waiting >= 0) record_cause(Cause::left, departed, waited_for_departed(departed, waiting));
}

void Members::ended(int rank, int64_t pid, const ExitStatus& exit_status) {
  Member& member = at(rank);
  member.exit_status = exit_status;
  int64_t& step = member.heartbeat.activity.step;
  step = std::max(step, exit_status.step);
  if (!member.joined) member.peer.pid = pid;
  if (member.peer.pid == pid) member.connected = false;
  const bool others_joined = std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.joined; });
  const bool follows = member.joined && exit_status.signal == 0 && exit_status.code == exit_code::peer_lost;
  if (!exit_status.good() || (!member.joined && others_joined))
    record_cause(follows ? Cause::follows : Cause::lost, rank, "");
  if (cause_ != Cause::follows) return;
  // A rank that left by an exception with exit code 0 (zr::ExitRequest) is the origin, not those that end because of
  // it.
  for (int other = 0; other < world(); ++other)
    if (at(other).heartbeat.failed && at(other).exit_status && at(other).exit_status->good())
      record_cause(Cause::lost, other, "");
}

void Members::record_cause(Cause cause, int rank, std::string text) {
  if (cause <= cause_) return;  // the first event of a cause is the origin; later ones are consequences
  cause_ = cause;
  cause_rank_ = rank;
  cause_text_ = std::move(text);
}

void Members::compare(int rank, const protocol::Heartbeat& heartbeat) {
  for (const auto& call : heartbeat.recent) {
    if (call.sequence == 0 || call.fingerprint == 0) continue;
    const auto [first, fresh] =
        first_issues_.try_emplace({heartbeat.leaves, call.sequence}, FirstIssue{rank, call.fingerprint, call.what});
    if (fresh || first->second.rank == rank || first->second.fingerprint == call.fingerprint) continue;
    FirstIssue low = first->second, high{rank, call.fingerprint, call.what};
    for (FirstIssue* issue : {&low, &high})
      if (issue->what.empty()) issue->what = "another one";
    if (low.rank > high.rank) std::swap(low, high);
    const std::string remedy = mismatch_remedy(low.what, high.what);
    record_cause(
        Cause::mismatch, rank,
        fmt::format("collective {} differs between ranks: rank {} issued {}, rank {} issued {}. All ranks must issue "
                    "the same collectives in the same order{}",
                    call.sequence, low.rank, low.what, high.rank, high.what, remedy.empty() ? "" : "; " + remedy));
  }
  while (first_issues_.size() > kMaxIssued) first_issues_.erase(first_issues_.begin());
}

bool Members::waits_for_departed(const Member& waiting, const Member& other) const {
  if (!waiting.connected || waiting.heartbeat.left || !waiting.heartbeat.activity.waiting) return false;
  if (other.heartbeat.leaves > waiting.heartbeat.leaves)
    return waiting.heartbeat.activity.sequence > other.heartbeat.left_sequence;
  return other.heartbeat.left && !other.connected;  // the process exited between two Engines
}

std::string Members::waited_for_departed(int departed, int waiting) const {
  const std::string& what = at(waiting).heartbeat.activity.what;
  const std::string call = collective_call(what);
  return fmt::format("rank {} {} while rank {} waits in {}{}", departed,
                     left_while_awaited_text(at(departed).heartbeat), waiting, what,
                     call.empty() ? "" : fmt::format("; {} is collective: call it on all ranks", call));
}

void Members::detect_waits_on_departed() {
  for (int departed = 0; departed < world(); ++departed) {
    if (at(departed).heartbeat.leaves == 0) continue;
    for (int waiting = 0; waiting < world(); ++waiting)
      if (waits_for_departed(at(waiting), at(departed)))
        return record_cause(Cause::left, departed, waited_for_departed(departed, waiting));
  }
}

bool Members::all_joined() const {
  return std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.joined; });
}

int64_t Members::process_of(int rank) const {
  const Member& member = at(rank);
  return member.connected && member.peer.machine == machine_ ? member.peer.pid : 0;
}

std::vector<protocol::Peer> Members::peers() const {
  std::vector<protocol::Peer> peers;
  for (const auto& member : members_) peers.push_back(member.peer);
  return peers;
}

int64_t Members::longest_silence_ms(Time now) const {
  int64_t longest = 0;
  for (const Member& member : members_)
    if (member.connected && !member.heartbeat.left) longest = std::max(longest, ms_between(member.heard, now));
  return longest;
}

bool Members::silent(int rank) const {
  const Member& member = at(rank);
  return member.connected && !member.answered && !member.heartbeat.left;
}

bool Members::has_long_been_silent(int rank, Time now) const {
  return silent(rank) && now - at(rank).heard >= kLongSilence;
}

bool Members::report_is_ready(Time since, Time now) const {
  if (cause_ == Cause::follows) return false;  // the other rank may end later
  // The report of a rank may arrive shortly before the death that caused it is detected.
  if (cause_ == Cause::reported && now - since < kReportGrace) return false;
  for (int rank = 0; rank < world(); ++rank) {
    const Member& member = at(rank);
    if (silent(rank) && !has_long_been_silent(rank, now)) return false;
    if (launched_ && member.joined && !member.connected && !member.exit_status) return false;
  }
  return true;
}

std::string Members::loss_reason(int rank) const {
  const Member& member = at(rank);
  if (!member.exit_status) {
    const bool dead = member.peer.machine == machine_ && protocol::is_dead(member.peer.pid);
    return std::string("is lost: its connection closed") + (dead ? " and its process is gone" : "");
  }
  std::string text = exit_status_text(*member.exit_status);
  if (!member.joined) return text + " before it joined the job";
  if (member.heartbeat.left) return fmt::format("{} after step {}", text, member.heartbeat.left_step);
  return member.exit_status->good() ? text + " without leaving the job" : text;
}

std::string Members::silence_text(int rank, Time now) const {
  const Member& member = at(rank);
  const std::string process =
      member.peer.machine == machine_ ? process_state_text(protocol::state_of(member.peer.pid)) : "";
  return fmt::format("{} has not answered for {}{}", rank_text(rank, member.peer.pid),
                     duration_text(static_cast<double>(ms_between(member.heard, now)) / 1000),
                     process.empty() ? "" : ", and its process is " + process);
}

// The ranks that may have caused a reported failure: those that have not reached the same collective.
std::string Members::state_of_other_ranks(Time now) const {
  std::string text;
  const auto& reporter = at(cause_rank_).heartbeat;
  for (int rank = 0; rank < world(); ++rank) {
    const Member& member = at(rank);
    if (rank == cause_rank_) continue;
    if (!member.joined) {
      text += fmt::format("; {} has not joined", rank_text(rank, member.peer.pid));
    } else if (member.heartbeat.left) {
      text += fmt::format("; rank {} {}", rank, left_while_awaited_text(member.heartbeat));
    } else if (silent(rank)) {
      text += "; " + silence_text(rank, now);
    } else if (!member.heartbeat.left && member.heartbeat.leaves == reporter.leaves && reporter.activity.waiting &&
               member.heartbeat.activity.sequence < reporter.activity.sequence) {
      text += fmt::format("; rank {} has not reached this collective", rank);
    }
  }
  if (refusals_ > 0 && !all_joined())
    text += fmt::format("; {} to join {} refused, the last one because {}",
                        refusals_ == 1 ? "1 request" : fmt::format("{} requests", refusals_),
                        refusals_ == 1 ? "was" : "were", last_refusal_);
  return text;
}

std::string Members::failure_notice() const {
  if (cause_ == Cause::lost || cause_ == Cause::follows)
    return fmt::format("{} {}", rank_text(cause_rank_, at(cause_rank_).peer.pid), loss_reason(cause_rank_));
  return cause_ == Cause::reported ? fmt::format("rank {}: {}", cause_rank_, cause_text_) : cause_text_;
}

// Ranks that were silent before may be the origin: mpirun ends those that it reaches if it loses a host.
std::string Members::headline(Time now) const {
  std::string text = failure_notice();
  if (cause_ == Cause::reported) return text + state_of_other_ranks(now);
  for (int rank = 0; rank < world() && cause_ == Cause::lost; ++rank)
    if (has_long_been_silent(rank, now)) text += "; " + silence_text(rank, now);
  return text;
}

std::string Members::status_text(int rank, Time now) const {
  const Member& member = at(rank);
  const std::string activity = activity_text(member.heartbeat.activity, member.heartbeat.age_ms);
  std::string text;
  if (member.exit_status && !(member.exit_status->good() && member.heartbeat.left)) {
    text = loss_reason(rank) + (member.joined && !member.heartbeat.left ? "; last seen: " + activity : "");
  } else if (!member.joined) {
    text = "has not joined the job";
  } else if (member.heartbeat.left) {
    text = left_text(member.heartbeat);
  } else if (!member.connected) {
    text = fmt::format("{}; last seen: {}", loss_reason(rank), activity);
  } else if (!member.answered) {
    const std::string process =
        member.peer.machine == machine_ ? process_state_text(protocol::state_of(member.peer.pid)) : "";
    text = fmt::format("no answer for {}{}; last seen: {}",
                       duration_text(static_cast<double>(ms_between(member.heard, now)) / 1000),
                       process.empty() ? "" : ", " + process, activity);
  } else {
    text = activity;
  }
  const bool in_headline = cause_ == Cause::reported && member.reported_text == cause_text_;
  return member.reported_text.empty() || in_headline ? text
                                                     : fmt::format("{}; reported: {}", text, member.reported_text);
}

std::string Members::failure_report(Time now) const {
  // With one rank, the table would only repeat the headline.
  if (world() == 1 && cause_ == Cause::lost && at(0).joined)
    return fmt::format("{} {}", rank_text(0, at(0).peer.pid), status_text(0, now));
  std::vector<ReportLine> lines;
  for (int rank = 0; rank < world(); ++rank)
    lines.push_back({rank, at(rank).peer.pid, at(rank).peer.host, status_text(rank, now)});
  const bool any_joined = std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.joined; });
  return any_joined ? failure_report_text(headline(now), lines) : headline(now);
}

}  // namespace zr::host::control
