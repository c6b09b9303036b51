#include "host_reduction.hpp"

#include <algorithm>
#include <cstring>

#include "sum_route.hpp"
#include "zr/float_cast.hpp"

namespace mpi {

namespace {
constexpr int64_t kPieceElements = kPieceBytes / int64_t{sizeof(float)};
constexpr std::size_t kSums = 8;                    // pieces in progress, per rank that works on them
constexpr int64_t kSumBytes = 3 * kPieceBytes / 2;  // a sum, and the same rounded to 16 bits
constexpr std::size_t kSends = 8;                   // messages in flight with elements of this rank
constexpr std::size_t kSteps = 16;                  // steps in progress

// Casts each element with the function for the 16-bit type; copies fp32.
template <class To, class From, class Bf16, class F16>
void cast(void* to, const void* from, zr_dtype dtype, int64_t count, Bf16&& bf16, F16&& f16) {
  auto* const out = static_cast<To*>(to);
  const auto* const in = static_cast<const From*>(from);
  if (dtype == ZR_F32) std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  for (int64_t i = 0; dtype == ZR_BF16 && i < count; ++i) out[i] = bf16(in[i]);
  for (int64_t i = 0; dtype == ZR_F16 && i < count; ++i) out[i] = f16(in[i]);
}

void upcast(float* to, const void* from, zr_dtype dtype, int64_t count) {
  cast<float, uint16_t>(
      to, from, dtype, count, [](uint16_t x) { return zr::from_bf16(x); }, [](uint16_t x) { return zr::from_f16(x); });
}

void round_to(void* to, zr_dtype dtype, const float* from, int64_t count) {
  cast<uint16_t, float>(
      to, from, dtype, count, [](float x) { return zr::to_bf16(x); }, [](float x) { return zr::to_f16(x); });
}
}  // namespace

int64_t HostReduction::buffer_bytes() { return static_cast<int64_t>(kSums) * kSumBytes; }

// The owner's elements of a reduce_scatter are its part, those of a reduce are all. Of an all_reduce, ranks of the last
// host own them in turn. Pieces of different owners alternate, so that all links are busy.
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
    const int last = hosts.count() - 1;
    int64_t number = 0;
    for (int64_t first = 0; first < coll.src.count; first += kPieceElements, ++number)
      pieces_.push_back({is_all_reduce() ? hosts.first(last) + static_cast<int>(number % hosts.size(last)) : coll.root,
                         first, first, std::min(kPieceElements, coll.src.count - first)});
  }
  const int own_host = hosts.of(parts_.rank);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i];
    piece.work = works_.size();
    const int home = hosts.of(piece.owner);
    if (!sum_route(parts_, hosts, home).contains(own_host)) {
      to_send_.push_back(i);
    } else if (hosts.helper(own_host, piece.owner) == parts_.rank) {
      works_.emplace_back().piece = i;
      if (piece.owner == parts_.rank && needs_elements(channel, home)) works_.back().raw = raws_++;
    }
  }
}

bool HostReduction::needs_elements(const Channel& channel, int home) const {
  const SumRoute way = sum_route(parts_, channel.hosts, home);
  return way.first > 0 || way.last < channel.hosts.count() - 1;
}

// A broadcast follows the additions of the next pieces, whose sums are on their way meanwhile.
void HostReduction::list_steps(const Channel& channel) {
  const Hosts& hosts = channel.hosts;
  const int own_host = hosts.of(parts_.rank);
  std::size_t broadcasts = is_all_reduce() ? 0 : pieces_.size();
  const std::size_t delay = kSums * static_cast<std::size_t>(hosts.size(own_host));
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (sum_route(parts_, hosts, hosts.of(pieces_[i].owner)).contains(own_host)) steps_.push_back({i, false});
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

// Where the elements of a rank of another host arrive.
char* HostReduction::elements_of(const Channel& channel, const Work& work, int rank) const {
  const int peer = rank < parts_.rank ? rank : rank - 1;
  return channel.pieces + (work.raw % 2 * (parts_.world - 1) + peer) * kPieceBytes;
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
    more |= receive_results();
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
    sending_.emplace_back().send(static_cast<const char*>(parts_.coll.src.data) + piece.from * width,
                                 piece.count * width, piece.owner, tag(channel, Phase::parts, piece.count * width),
                                 channel.collectives, parts_.what());
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

// Posts what arrives before the ranks of this host add their elements; false if there is no memory for it yet.
bool HostReduction::begin(Channel& channel, Work& work) {
  if (work.raw >= raws_used_ + 2) return false;
  const Piece& piece = pieces_[work.piece];
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), home = hosts.of(piece.owner);
  const SumRoute way = sum_route(parts_, hosts, home);
  const int64_t sum_bytes = piece.count * int64_t{sizeof(float)}, dst_width = zr::size_of(parts_.coll.dst.dtype);
  const auto receive = [&](void* to, int64_t bytes, int from, Phase phase) {
    work.arriving.receive(to, bytes, from, tag(channel, phase, bytes), channel.collectives, parts_.what());
  };
  if (host > way.first) receive(sum_of(channel, work), sum_bytes, hosts.helper(host - 1, piece.owner), Phase::sums);
  const bool has_seed = accumulates() && way.first < home;
  if (has_seed && host == way.first) {
    const bool is_rounded = parts_.coll.dst.dtype != ZR_F32;
    void* const to = is_rounded ? static_cast<void*>(rounded_of(channel, work)) : sum_of(channel, work);
    receive(to, piece.count * dst_width, piece.owner, Phase::seeds);
  }
  if (has_seed && host == home)
    work.arriving.send(dst_of(piece), piece.count * dst_width, hosts.helper(way.first, piece.owner),
                       tag(channel, Phase::seeds, piece.count * dst_width), channel.collectives, parts_.what());
  if (work.raw >= 0)
    for (int rank = 0; rank < parts_.world; ++rank)
      if (!way.contains(hosts.of(rank)))
        receive(elements_of(channel, work, rank), piece.count * zr::size_of(parts_.coll.src.dtype), rank, Phase::parts);
  work.state = Work::State::receives;
  return true;
}

// The sum before the ranks of this host add their elements.
void HostReduction::prepare(Channel& channel, Work& work) {
  const Piece& piece = pieces_[work.piece];
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), home = hosts.of(piece.owner);
  const SumRoute way = sum_route(parts_, hosts, home);
  if (host > way.first) return;
  float* const sum = sum_of(channel, work);
  if (!accumulates())
    std::fill_n(sum, piece.count, 0.0f);
  else if (host == home)
    upcast(sum, dst_of(piece), parts_.coll.dst.dtype, piece.count);
  else if (parts_.coll.dst.dtype != ZR_F32)
    upcast(sum, rounded_of(channel, work), parts_.coll.dst.dtype, piece.count);
  if (host == home) add_elements(channel, work, 0, hosts.first(home));
}

void HostReduction::add_elements(Channel& channel, const Work& work, int first_rank, int end_rank) {
  if (first_rank == end_rank) return;
  std::vector<const void*> sources;
  for (int rank = first_rank; rank < end_rank; ++rank) sources.push_back(elements_of(channel, work, rank));
  void* const sum = sum_of(channel, work);
  channel.reduce({ZR_SUM, true, parts_.coll.src.dtype, ZR_F32}, sources.data(), static_cast<int32_t>(sources.size()),
                 &sum, 1, 0, pieces_[work.piece].count, false);
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
      if (!work.leaving.complete(parts_.what())) return false;
      work.state = State::complete;
      return true;
    default: return false;  // submit_steps() advances the others
  }
}

// The ranks of this host have added their elements.
void HostReduction::finish(Channel& channel, Work& work) {
  const Piece& piece = pieces_[work.piece];
  const Hosts& hosts = channel.hosts;
  const int host = hosts.of(parts_.rank), home = hosts.of(piece.owner);
  const SumRoute way = sum_route(parts_, hosts, home);
  const zr_dtype dtype = parts_.coll.dst.dtype;
  const int64_t bytes = piece.count * zr::size_of(dtype);
  float* const sum = sum_of(channel, work);
  work.state = Work::State::sends;
  if (host == home && way.last == home) {
    add_elements(channel, work, hosts.first(home + 1), parts_.world);
    round_to(dst_of(piece), dtype, sum, piece.count);
    work.has_result = true;
    for (int other = 0; is_all_reduce() && other < home; ++other)
      whole_.send(dst_of(piece), bytes, hosts.helper(other, piece.owner), tag(channel, Phase::results, bytes),
                  channel.collectives, parts_.what());
  } else if (host < way.last) {
    work.leaving.send(sum, piece.count * int64_t{sizeof(float)}, hosts.helper(host + 1, piece.owner),
                      tag(channel, Phase::sums, piece.count * int64_t{sizeof(float)}), channel.collectives,
                      parts_.what());
  } else {
    void* const rounded = dtype == ZR_F32 ? static_cast<void*>(sum) : rounded_of(channel, work);
    if (rounded != sum) round_to(rounded, dtype, sum, piece.count);
    work.leaving.send(rounded, bytes, piece.owner, tag(channel, Phase::results, bytes), channel.collectives,
                      parts_.what());
  }
  if (work.raw >= 0) raws_used_ = work.raw + 1;
  // dst may be src: no rank of this host reads these elements any more.
  Requests& result = is_all_reduce() ? work.result : whole_;
  if (is_all_reduce() ? !work.has_result : host == home && way.last > home)
    result.receive(dst_of(piece), bytes, is_all_reduce() ? piece.owner : hosts.helper(way.last, piece.owner),
                   tag(channel, Phase::results, bytes), channel.collectives, parts_.what());
}

// Of an all_reduce: sums that have come back.
bool HostReduction::receive_results() {
  bool moved = false;
  for (; is_all_reduce() && results_ < begun_; ++results_, moved = true) {
    Work& work = works_[results_];
    const bool is_added = work.state == Work::State::sends || work.state == Work::State::complete;
    if (!is_added || !work.result.complete(parts_.what())) return moved;
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
    if (is_own && !step.is_broadcast) finish(channel, works_[piece.work]);
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
    local.flags = ZR_COLL_ACCUMULATE;
    local.src = {static_cast<char*>(src.data) + piece.from * zr::size_of(src.dtype), piece.count, src.dtype, 0,
                 src.device};
    if (is_own) {
      works_[piece.work].state = Work::State::adds;
      local.dst = {sum_of(channel, works_[piece.work]), piece.count, ZR_F32, 0, src.device};
    }
  }
  running_.push_back(channel.local->submit(local));
}

}  // namespace mpi
