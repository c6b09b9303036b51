#include "control/members.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "control/call_mismatch.hpp"

namespace zr::host {

namespace {
constexpr std::size_t kMostIssued = 4096;
constexpr auto kForStragglers = std::chrono::milliseconds(200);
constexpr auto kSilence = std::chrono::seconds(1);

int64_t ms_between(Members::Time from, Members::Time to) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(to - from).count();
}
}  // namespace

Members::Members(int world, bool launched, std::string machine)
    : launched_(launched), machine_(std::move(machine)), members_(static_cast<std::size_t>(world)) {}

void Members::started(int rank, int64_t pid) { at(rank).peer.pid = pid; }

std::string Members::admit(const wire::Hello& hello, Time now) {
  if (hello.world != world())
    return "rank " + std::to_string(hello.rank) + " was told of " + std::to_string(hello.world) +
           " ranks, the job has " + std::to_string(world()) + ": start all ranks with one launcher command";
  if (hello.rank < 0 || hello.rank >= world()) return "there is no rank " + std::to_string(hello.rank);
  Member& member = at(static_cast<int>(hello.rank));
  if (member.joined)
    return rank_text(static_cast<int>(hello.rank), member.peer.pid) + " has joined already, and pid " +
           std::to_string(hello.peer.pid) + " on " + hello.peer.host +
           " claims to be it too: give each process its own rank";
  member.joined = member.connected = true;
  member.peer = hello.peer;
  member.heard = now;
  member.beat.activity.what = "join";
  member.beat.activity.waiting = true;
  for (int rank = 0; rank < world(); ++rank)
    if (at(rank).fate && !at(rank).joined) note(Cause::lost, rank, "");
  return "";
}

void Members::heard(int rank, const wire::Beat& beat, Time now) {
  Member& member = at(rank);
  if (member.beat.leaves == 0 && beat.leaves > 0) ++leavers_;
  compare(rank, beat);
  member.beat = beat;
  member.beat.recent.clear();
  member.heard = now;
  if (leavers_ > 0) look_for_waits_on_the_gone();
}

void Members::last_words(int rank, const wire::Beat& beat, Time now) {
  heard(rank, beat, now);
  at(rank).answered = true;
}

void Members::reported(int rank, const std::string& text) {
  at(rank).said = text;
  note(Cause::reported, rank, text);
}

void Members::disconnected(int rank) {
  Member& member = at(rank);
  member.connected = false;
  if (!member.beat.left) return note(Cause::lost, rank, "");
  look_for_waits_on_the_gone();
}

void Members::look_for_the_dead(Time now) {
  for (int rank = 0; rank < world(); ++rank) {
    const Member& member = at(rank);
    if (member.connected && now - member.heard > kSilence && member.peer.machine == machine_ &&
        wire::is_dead(member.peer.pid))
      disconnected(rank);
  }
}

void Members::ended(int rank, int64_t pid, const Fate& fate) {
  Member& member = at(rank);
  member.fate = fate;
  if (!member.joined) member.peer.pid = pid;
  if (member.peer.pid == pid) member.connected = false;
  const bool others_joined = std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.joined; });
  if (!fate.good() || (!member.joined && others_joined)) note(Cause::lost, rank, "");
}

void Members::note(Cause cause, int rank, std::string text) {
  if (cause <= cause_) return;  // the first of a kind is the origin, the others followed from it
  cause_ = cause;
  culprit_ = rank;
  text_ = std::move(text);
}

void Members::compare(int rank, const wire::Beat& beat) {
  for (const auto& call : beat.recent) {
    if (call.sequence == 0 || call.fingerprint == 0) continue;
    const auto [first, fresh] =
        issued_.try_emplace({beat.leaves, call.sequence}, Issued{rank, call.fingerprint, call.what});
    if (fresh || first->second.rank == rank || first->second.fingerprint == call.fingerprint) continue;
    Issued low = first->second, high{rank, call.fingerprint, call.what};
    if (low.rank > high.rank) std::swap(low, high);
    const std::string remedy = mismatch_remedy(low.what, high.what);
    note(Cause::mismatch, rank,
         "collective " + std::to_string(call.sequence) + " differs between ranks: rank " + std::to_string(low.rank) +
             " issued " + low.what + ", rank " + std::to_string(high.rank) + " issued " + high.what +
             ". All ranks must issue the same collectives in the same order" + (remedy.empty() ? "" : "; " + remedy));
  }
  while (issued_.size() > kMostIssued) issued_.erase(issued_.begin());
}

bool Members::waits_in_vain(const Member& waiting, const Member& other) const {
  if (!waiting.connected || waiting.beat.left || !waiting.beat.activity.waiting) return false;
  if (other.beat.leaves > waiting.beat.leaves) return waiting.beat.activity.sequence > other.beat.left_sequence;
  return other.beat.left && !other.connected;  // the process ended between two Engines
}

std::string Members::waited_in_vain(int gone, int waiting) const {
  const std::string& what = at(waiting).beat.activity.what;
  const std::string call = collective_call(what);
  return "rank " + std::to_string(gone) + " " + in_vain_text(at(gone).beat) + " while rank " + std::to_string(waiting) +
         " waits in " + what + (call.empty() ? "" : "; " + call + " is collective: call it on all ranks");
}

void Members::look_for_waits_on_the_gone() {
  for (int gone = 0; gone < world(); ++gone) {
    if (at(gone).beat.leaves == 0) continue;
    for (int waiting = 0; waiting < world(); ++waiting)
      if (waits_in_vain(at(waiting), at(gone))) return note(Cause::left, gone, waited_in_vain(gone, waiting));
  }
}

bool Members::everybody_joined() const {
  return std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.joined; });
}

std::vector<wire::Peer> Members::peers() const {
  std::vector<wire::Peer> peers;
  for (const auto& member : members_) peers.push_back(member.peer);
  return peers;
}

bool Members::silent(int rank) const {
  const Member& member = at(rank);
  return member.connected && !member.answered && !member.beat.left;
}

bool Members::settled(Time since, Time now) const {
  // What a rank saw for itself may precede the news of a death by a moment.
  if (cause_ == Cause::reported && now - since < kForStragglers) return false;
  for (int rank = 0; rank < world(); ++rank) {
    const Member& member = at(rank);
    if (silent(rank)) return false;
    if (launched_ && member.joined && !member.connected && !member.fate) return false;
  }
  return true;
}

std::string Members::why(int rank) const {
  const Member& member = at(rank);
  if (!member.fate) {
    const bool dead = member.peer.machine == machine_ && wire::is_dead(member.peer.pid);
    return std::string("is lost: its connection closed") + (dead ? " and its process is gone" : "");
  }
  std::string text = fate_text(*member.fate);
  if (!member.joined) return text + " before it joined the job";
  if (member.beat.left) return text + " after step " + std::to_string(member.beat.left_step);
  return member.fate->good() ? text + " without leaving the job" : text;
}

// Who may be the reason for what a rank reported: those who are not where it is.
std::string Members::others_than_reporter(Time now) const {
  std::string text;
  const auto& reporter = at(culprit_).beat;
  for (int rank = 0; rank < world(); ++rank) {
    const Member& member = at(rank);
    if (rank == culprit_) continue;
    if (!member.joined) {
      text += "; " + rank_text(rank, member.peer.pid) + " has not joined";
    } else if (member.beat.left) {
      text += "; rank " + std::to_string(rank) + " " + in_vain_text(member.beat);
    } else if (silent(rank)) {
      const std::string process = member.peer.machine == machine_ ? state_text(wire::state_of(member.peer.pid)) : "";
      text += "; " + rank_text(rank, member.peer.pid) + " has not answered for " +
              duration_text(static_cast<double>(ms_between(member.heard, now)) / 1000) +
              (process.empty() ? "" : ", it is " + process);
    } else if (!member.beat.left && member.beat.leaves == reporter.leaves && reporter.activity.waiting &&
               member.beat.activity.sequence < reporter.activity.sequence) {
      text += "; rank " + std::to_string(rank) + " has not come to it";
    }
  }
  return text;
}

std::string Members::news() const {
  if (cause_ == Cause::lost) return rank_text(culprit_, at(culprit_).peer.pid) + " " + why(culprit_);
  return cause_ == Cause::reported ? "rank " + std::to_string(culprit_) + ": " + text_ : text_;
}

std::string Members::headline(Time now) const {
  return cause_ == Cause::reported ? news() + others_than_reporter(now) : news();
}

std::string Members::state(int rank, Time now) const {
  const Member& member = at(rank);
  const std::string doing = doing_text(member.beat.activity, member.beat.age_ms);
  std::string text;
  if (member.fate && !(member.fate->good() && member.beat.left)) {
    text = why(rank) + (member.joined && !member.beat.left ? "; last seen: " + doing : "");
  } else if (!member.joined) {
    text = "has not joined the job";
  } else if (member.beat.left) {
    text = left_text(member.beat);
  } else if (!member.connected) {
    text = why(rank) + "; last seen: " + doing;
  } else if (!member.answered) {
    const std::string process = member.peer.machine == machine_ ? state_text(wire::state_of(member.peer.pid)) : "";
    text = "no answer for " + duration_text(static_cast<double>(ms_between(member.heard, now)) / 1000) +
           (process.empty() ? "" : ", " + process) + "; last seen: " + doing;
  } else {
    text = doing;
  }
  const bool in_headline = cause_ == Cause::reported && member.said == text_;
  return member.said.empty() || in_headline ? text : text + "; says: " + member.said;
}

std::string Members::table(Time now) const {
  // One rank: no table that would say the same twice.
  if (world() == 1 && cause_ == Cause::lost && at(0).joined) return rank_text(0, at(0).peer.pid) + " " + state(0, now);
  std::vector<TableLine> lines;
  for (int rank = 0; rank < world(); ++rank)
    lines.push_back({rank, at(rank).peer.pid, at(rank).peer.host, state(rank, now)});
  const bool any_joined = std::any_of(members_.begin(), members_.end(), [](const Member& m) { return m.joined; });
  return any_joined ? table_text(headline(now), lines) : headline(now);
}

}  // namespace zr::host
