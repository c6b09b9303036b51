#include "host_reduction.hpp"

#include <algorithm>
#include <utility>

namespace mpi {

namespace {
constexpr std::size_t kSums = 8;                    // pieces in progress, per rank that works on them
constexpr int64_t kSumBytes = 3 * kPieceBytes / 2;  // a sum, and the same rounded to 16 bits
constexpr std::size_t kSends = 8;                   // messages in flight with elements of this rank
constexpr std::size_t kSteps = 16;                  // steps in progress
}  // namespace

int64_t HostReduction::buffer_bytes() { return static_cast<int64_t>(kSums) * kSumBytes; }

// The owner's elements of a reduce_scatter are its part, those of a reduce are all. Pieces of different owners
// alternate, so that all links are busy.
void HostReduction::list_pieces(const Channel& channel) {
  const zr_coll& coll = parts_.coll;
  const Hosts& hosts = channel.hosts;
  if (coll.op == ZR_REDUCE_SCATTER) {
    const int64_t most = *std::max_element(parts_.counts.begin(), parts_.counts.end());
    for (int64_t first = 0; first < most; first += kPieceElements)
      for (int owner = 0; owner < parts_.world; ++owner) {
        const zr::Extent part = parts_.extent(0, owner, nullptr, nullptr);
        if (first < part.count)
          pieces_.push_back({owner, part.from + first, first, std::min(kPieceElements, part.count - first)});
      }
  } else {
    int64_t number = 0;
    for (int64_t first = 0; first < coll.src.count; first += kPieceElements, ++number)
      pieces_.push_back({is_all_reduce() ? owner_of(channel, number) : coll.root, first, first,
                         std::min(kPieceElements, coll.src.count - first)});
  }
  if (sums_meet_at_owner()) delay_own_pieces(channel);
  const int own_host = hosts.of(parts_.rank);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i];
    piece.work = works_.size();
    if (!passes_here(channel, piece)) {
      to_send_.push_back(i);
    } else if (hosts.helper(own_host, piece.owner) == parts_.rank) {
      works_.emplace_back().piece = i;
      if (piece.owner == parts_.rank && needs_slot(channel, own_host)) works_.back().slot = slots_++;
    }
  }
}

// A piece whose owner is on this host waits for the sums of the other hosts. Before it, the ranks of this host add to
// the next pieces of these hosts; otherwise hosts would wait for each other by turns. Pieces of one owner keep their
// order. A rank works on fewer than 2 * delay pieces between one that waits and an earlier one that has a higher
// number, so that there is memory for all of them: nothing waits for a piece with a higher number.
void HostReduction::delay_own_pieces(const Channel& channel) {
  constexpr std::size_t kDelay = kSums / 2;
  const Hosts& hosts = channel.hosts;
  const int own_host = hosts.of(parts_.rank);
  std::vector<std::pair<std::size_t, Piece>> places;
  for (std::size_t i = 0; i < pieces_.size(); ++i)
    places.emplace_back(i + (hosts.of(pieces_[i].owner) == own_host ? kDelay : 0), pieces_[i]);
  std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < pieces_.size(); ++i) pieces_[i] = places[i].second;
}

// A broadcast follows the additions of the next pieces, whose sums are on their way meanwhile.
void HostReduction::list_steps(const Channel& channel) {
  const Hosts& hosts = channel.hosts;
  std::size_t broadcasts = is_all_reduce() ? 0 : pieces_.size();
  const std::size_t delay = kSums * static_cast<std::size_t>(hosts.size(hosts.of(parts_.rank)));
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (passes_here(channel, pieces_[i])) steps_.push_back({i, false});
    if (i >= delay && broadcasts < pieces_.size()) steps_.push_back({broadcasts++, true});
  }
  for (; broadcasts < pieces_.size(); ++broadcasts) steps_.push_back({broadcasts, true});
}

float* HostReduction::sum_of(const Channel& channel, const Work& work) const {
  const auto number = static_cast<std::size_t>(&work - works_.data());
  return reinterpret_cast<float*>(channel.sums + static_cast<int64_t>(number % kSums) * kSumBytes);
}

char* HostReduction::rounded_of(const Channel& channel, const Work& work) const {
  return reinterpret_cast<char*>(sum_of(channel, work)) + kPieceBytes;
}

char* HostReduction::slot_of(const Channel& channel, const Work& work, int i) const {
  return channel.pieces + (work.slot % 2 * (parts_.world - 1) + i) * kPieceBytes;
}

const char* HostReduction::src_of(const Piece& piece) const {
  return static_cast<const char*>(parts_.coll.src.data) + piece.from * zr::size_of(parts_.coll.src.dtype);
}

char* HostReduction::dst_of(const Piece& piece) const {
  return static_cast<char*>(parts_.coll.dst.data) + piece.to * zr::size_of(parts_.coll.dst.dtype);
}

void HostReduction::start(Channel& channel) {
  has_started_ = true;
  channel.is_used = true;
  list_pieces(channel);
  list_steps(channel);
  channel.local->begin(number_);
  if (steps_.empty()) channel.local->end(number_);
  advance(channel);
}

bool HostReduction::advance(Channel& channel) {
  bool moved = send_elements(channel);
  channel.local->progress();
  for (bool more = true; more; moved |= more) {
    more = advance_works(channel);
    more |= receive_results(channel);
    more |= submit_steps(channel);
  }
  if (ended_ < works_.size() || added_ < steps_.size() || sent_ < to_send_.size() || !sending_.empty()) return moved;
  if (is_all_reduce() && results_ < works_.size()) return moved;
  if (!whole_.complete(parts_.what())) return moved;
  channel.is_used = false;
  is_complete_ = true;
  return true;
}

// Of this rank, to owners on hosts to which no sum passes from here.
bool HostReduction::send_elements(Channel& channel) {
  bool moved = false;
  while (!sending_.empty() && sending_.front().complete(parts_.what())) {
    sending_.pop_front();
    moved = true;
  }
  for (; sent_ < to_send_.size() && sending_.size() < kSends; ++sent_, moved = true) {
    const Piece& piece = pieces_[to_send_[sent_]];
    const int64_t width = zr::size_of(parts_.coll.src.dtype);
    send_part(channel, sending_.emplace_back(), src_of(piece), piece.count * width, piece.owner, Phase::parts);
  }
  return moved;
}

bool HostReduction::advance_works(Channel& channel) {
  bool moved = false;
  while (begun_ < works_.size() && begun_ < ended_ + kSums && begin(channel, works_[begun_])) {
    ++begun_;
    moved = true;
  }
  for (std::size_t i = ended_; i < begun_; ++i)
    while (advance(channel, works_[i])) moved = true;
  while (ended_ < begun_ && works_[ended_].state == Work::State::complete) ++ended_;
  return moved;
}

// False if there is no memory yet for what arrives.
bool HostReduction::begin(Channel& channel, Work& work) {
  if (work.slot >= slots_used_ + 2) return false;
  receive(channel, work);
  work.state = Work::State::receives;
  return true;
}

// One state further; false if the work has to wait.
bool HostReduction::advance(Channel& channel, Work& work) {
  using State = Work::State;
  switch (work.state) {
    case State::receives:
      if (!work.arriving.complete(parts_.what())) return false;
      prepare(channel, work);
      work.state = State::ready;
      return true;
    case State::sends:
      if (!work.leaving.complete(parts_.what()) || (work.keeps_until_result && !work.has_result)) return false;
      work.state = State::complete;
      return true;
    default: return false;  // submit_steps() advances the others
  }
}

// Of an all_reduce: sums that have come back.
bool HostReduction::receive_results(Channel& channel) {
  bool moved = false;
  for (; is_all_reduce() && results_ < begun_; ++results_, moved = true) {
    Work& work = works_[results_];
    const bool is_added = work.state == Work::State::sends || work.state == Work::State::complete;
    if (!is_added || !work.result.complete(parts_.what())) return moved;
    if (!work.has_result) take_result(channel, work);
    work.has_result = true;
  }
  return moved;
}

bool HostReduction::submit_steps(Channel& channel) {
  bool moved = false;
  while (!running_.empty() && running_.front().ready()) {
    running_.pop_front();
    const Step& step = steps_[added_++];
    const Piece& piece = pieces_[step.piece];
    const bool is_own = channel.hosts.helper(channel.hosts.of(parts_.rank), piece.owner) == parts_.rank;
    if (is_own && !step.is_broadcast) {
      Work& work = works_[piece.work];
      work.state = Work::State::sends;
      finish(channel, work);
      if (work.slot >= 0) slots_used_ = work.slot + 1;
    }
    moved = true;
  }
  while (submitted_ < steps_.size() && may_submit(channel, steps_[submitted_])) {
    submit(channel, steps_[submitted_++]);
    moved = true;
    if (submitted_ == steps_.size()) channel.local->end(number_);
  }
  return moved;
}

bool HostReduction::may_submit(const Channel& channel, const Step& step) const {
  if (running_.size() >= kSteps || !channel.local->is_turn(number_)) return false;
  const Piece& piece = pieces_[step.piece];
  if (channel.hosts.helper(channel.hosts.of(parts_.rank), piece.owner) != parts_.rank) return true;
  const Work& work = works_[piece.work];
  return step.is_broadcast ? work.has_result : work.state == Work::State::ready;
}

void HostReduction::submit(Channel& channel, const Step& step) {
  const Piece& piece = pieces_[step.piece];
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), helper = hosts.helper(host, piece.owner);
  const bool is_own = helper == parts_.rank;
  zr_coll local{};
  local.size = sizeof local;
  local.label = parts_.label.c_str();
  local.root = helper - hosts.first(host);
  local.fingerprint = parts_.coll.fingerprint * 31 + submitted_;
  if (step.is_broadcast) {
    local.op = ZR_BROADCAST;
    local.dst = {dst_of(piece), piece.count, parts_.coll.dst.dtype, 0, parts_.coll.dst.device};
    local.src = local.dst;
  } else {
    const zr_view& src = parts_.coll.src;
    local.op = ZR_REDUCE;
    local.reduce = ZR_SUM;
    local.flags = begins_here(channel, piece) ? 0 : ZR_COLL_ACCUMULATE;
    local.src = {static_cast<char*>(src.data) + piece.from * zr::size_of(src.dtype), piece.count, src.dtype, 0,
                 src.device};
    if (is_own) {
      works_[piece.work].state = Work::State::adds;
      if (!needs_sum(channel, piece)) return void(running_.emplace_back());
      local.dst = {sum_of(channel, works_[piece.work]), piece.count, ZR_F32, 0, src.device};
    }
  }
  running_.push_back(channel.local->submit(local));
}

}  // namespace mpi
