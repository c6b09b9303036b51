#include "flat_transfer.hpp"

#include <algorithm>
#include <cstring>

#include "mpi_thread.hpp"
#include "zr/round_up.hpp"

namespace mpi {

namespace {
constexpr std::size_t kSendsPerPeer = 4;  // pieces in flight
constexpr int64_t kResultPieces = 4;      // reduced pieces of an all_reduce per message of results
}  // namespace

const char* FlatTransfer::source() const {
  return copy_.empty() ? static_cast<const char*>(parts_.coll.src.data) : copy_.data();
}

bool FlatTransfer::shares_results(const zr::CollectiveParts& parts) {
  return parts.coll.op == ZR_ALL_REDUCE && !(parts.coll.flags & ZR_COLL_ACCUMULATE);
}

// Of an all_reduce, each rank reduces a share for all ranks; with ACCUMULATE the results differ between ranks, and each
// rank reduces all.
zr::Extent FlatTransfer::reduced_by(const zr::CollectiveParts& parts, int r) {
  const int64_t n = parts.coll.src.count;
  if (parts.coll.op == ZR_REDUCE_SCATTER) return parts.extent(0, r, nullptr, nullptr);
  if (parts.coll.op == ZR_REDUCE) return r == parts.coll.root ? zr::Extent{0, n, 0} : zr::Extent{};
  if (!shares_results(parts)) return {0, n, 0};
  const auto cut = [&](int64_t i) { return std::min(n, zr::round_up<int64_t>(n * i / parts.world, 64)); };
  return {cut(r), cut(r + 1) - cut(r), cut(r)};
}

void FlatTransfer::copy_own_part(const Channel& channel) {
  const zr_coll& coll = parts_.coll;
  const int rank = parts_.rank;
  if (parts_.is_message() || !parts_.sends(rank) || !parts_.receives(rank)) return;
  const int64_t width = parts_.width();
  if (parts_.is_reduction()) {
    if (parts_.world > 1) return;
    const void* const from = coll.src.data;
    void* const to = coll.dst.data;
    channel.reduce({coll.reduce, (coll.flags & ZR_COLL_ACCUMULATE) != 0, coll.src.dtype, coll.dst.dtype}, &from, 1, &to,
                   1, 0, coll.src.count, false);
    return;
  }
  const zr::Extent own = parts_.extent(rank, rank, parts_.counts.data(), parts_.recv_counts.data());
  const char* const from = source() + own.from * width;
  char* const to = static_cast<char*>(coll.dst.data) + own.to * width;
  if (own.count > 0 && from != to) std::memmove(to, from, static_cast<std::size_t>(own.count * width));
}

void FlatTransfer::start(Channel& channel) {
  has_started_ = true;
  const zr_coll& coll = parts_.coll;
  const bool accumulates = parts_.is_reduction() && (coll.flags & ZR_COLL_ACCUMULATE);
  if (parts_.in_place && (coll.op == ZR_ALL_TO_ALL || (coll.op == ZR_ALL_REDUCE && accumulates)))
    copy_.assign(static_cast<const char*>(coll.src.data), static_cast<const char*>(coll.src.data) + parts_.src_bytes());
  if (coll.op == ZR_BARRIER) {
    check(MPI_Ibarrier(channel.collectives, &whole_.add_send()), parts_.what());
  } else if (coll.op == ZR_SEND) {
    whole_.send(coll.src.data, parts_.src_bytes(), coll.peer, coll.tag, channel.messages, parts_.what());
  } else if (coll.op == ZR_RECV) {
    whole_.receive(coll.dst.data, parts_.dst_bytes(), coll.peer, coll.tag, channel.messages, parts_.what());
  } else if (parts_.is_reduction()) {
    list_pieces();
    channel.is_used = true;
    for (int64_t piece = 0; piece < std::min<int64_t>(2, pieces_); ++piece) receive_piece(channel, piece);
    send_pieces(channel);
  } else {
    post_parts(channel);
    copy_own_part(channel);
  }
}

// Every part goes directly from its source to its destination.
void FlatTransfer::post_parts(Channel& channel) {
  const int rank = parts_.rank, world = parts_.world;
  const int64_t width = parts_.width();
  const int64_t *const to = parts_.counts.data(), *const from = parts_.recv_counts.data();
  for (int i = 1; i < world; ++i) {
    const int p = (rank + world - i) % world;
    if (!parts_.receives(rank) || !parts_.sends(p)) continue;
    zr::Extent part = parts_.extent(p, rank, to, from);
    if (parts_.coll.op == ZR_ALL_TO_ALL) part.count = from[p];  // only p knows what it cut
    receive_part(channel, whole_, static_cast<char*>(parts_.coll.dst.data) + part.to * width, part.count * width, p,
                 Phase::parts);
  }
  for (int i = 1; i < world; ++i) {
    const int r = (rank + i) % world;
    if (!parts_.sends(rank) || !parts_.receives(r)) continue;
    const zr::Extent part = parts_.extent(rank, r, to, from);
    send_part(channel, whole_, source() + part.from * width, part.count * width, r, Phase::parts);
  }
}

void FlatTransfer::list_pieces() {
  const int rank = parts_.rank, world = parts_.world;
  const int64_t width = zr::size_of(parts_.coll.src.dtype);
  piece_elements_ = kPieceBytes / width;
  const zr::Extent own = reduced_by(parts_, rank);
  pieces_ = (own.count + piece_elements_ - 1) / piece_elements_;
  for (int r = 0; r < world; ++r) most_ = std::max(most_, reduced_by(parts_, r).count);
  for (int64_t first = 0; first < most_; first += piece_elements_)
    for (int i = 1; i < world; ++i) {
      const int r = (rank + i) % world;
      const zr::Extent part = reduced_by(parts_, r);
      if (first >= part.count) continue;
      to_send_.push_back(
          {r, source() + (part.from + first) * width, std::min(piece_elements_, part.count - first) * width, first});
    }
  has_left_.resize(to_send_.size());
  sending_.assign(kSendsPerPeer * static_cast<std::size_t>(world - 1), MPI_REQUEST_NULL);
  ended_.resize(sending_.size());
  sent_by_.resize(sending_.size());
}

bool FlatTransfer::send_pieces(Channel& channel) {
  int n = 0;
  const int code =
      MPI_Testsome(static_cast<int>(sending_.size()), sending_.data(), &n, ended_.data(), MPI_STATUSES_IGNORE);
  check(code, parts_.what());
  bool moved = n != MPI_UNDEFINED && n > 0;
  for (int i = 0; moved && i < n; ++i) has_left_[sent_by_[static_cast<std::size_t>(ended_[i])]] = 1;
  while (left_ < to_send_.size() && has_left_[left_]) ++left_;
  for (std::size_t i = 0; i < sending_.size(); ++i) {
    MPI_Request& request = sending_[i];
    if (request != MPI_REQUEST_NULL || sent_ == to_send_.size()) continue;
    sent_by_[i] = sent_;
    const Piece& piece = to_send_[sent_++];
    const int number = tag(channel, Phase::parts, piece.bytes);
    check(start_send(piece.data, piece.bytes, piece.peer, number, channel.collectives, request), parts_.what());
    moved = true;
  }
  if (shares_results(parts_)) receive_results(channel);
  return moved;
}

void FlatTransfer::receive_piece(Channel& channel, int64_t piece) {
  const int64_t width = zr::size_of(parts_.coll.src.dtype);
  const int64_t count = std::min(piece_elements_, reduced_by(parts_, parts_.rank).count - piece * piece_elements_);
  Requests& requests = receiving_[piece % 2];
  char* slot = channel.pieces + (piece % 2) * (parts_.world - 1) * kPieceBytes;
  for (int p = 0; p < parts_.world; ++p) {
    if (p == parts_.rank) continue;
    const int bytes = static_cast<int>(count * width);
    check(MPI_Irecv(slot, bytes, MPI_BYTE, p, tag(channel, Phase::parts, bytes), channel.collectives,
                    &requests.add_receive(bytes)),
          parts_.what());
    slot += kPieceBytes;
  }
}

void FlatTransfer::reduce_piece(Channel& channel, int64_t piece) {
  const zr_coll& coll = parts_.coll;
  const zr::Extent own = reduced_by(parts_, parts_.rank);
  const int64_t first = piece * piece_elements_, count = std::min(piece_elements_, own.count - first);
  std::vector<const void*> sources;
  const char* slot = channel.pieces + (piece % 2) * (parts_.world - 1) * kPieceBytes;
  for (int p = 0; p < parts_.world; ++p) {
    const bool is_own = p == parts_.rank;
    sources.push_back(is_own ? source() + (own.from + first) * zr::size_of(coll.src.dtype) : slot);
    if (!is_own) slot += kPieceBytes;
  }
  void* const to = static_cast<char*>(coll.dst.data) + (own.to + first) * zr::size_of(coll.dst.dtype);
  channel.reduce({coll.reduce, (coll.flags & ZR_COLL_ACCUMULATE) != 0, coll.src.dtype, coll.dst.dtype}, sources.data(),
                 parts_.world, &to, 1, 0, count, false);
}

bool FlatTransfer::reduce_pieces(Channel& channel) {
  if (reduced_ == pieces_ || !receiving_[reduced_ % 2].complete(parts_.what())) return false;
  reduce_piece(channel, reduced_);
  if (reduced_ + 2 < pieces_) receive_piece(channel, reduced_ + 2);
  ++reduced_;
  if (shares_results(parts_) && (reduced_ % kResultPieces == 0 || reduced_ == pieces_)) send_results(channel);
  return true;
}

// The elements of message `number` with results of rank r.
zr::Extent FlatTransfer::results_of(int r, int64_t number) const {
  const zr::Extent part = reduced_by(parts_, r);
  const int64_t elements = kResultPieces * piece_elements_, first = std::min(part.count, number * elements);
  return {part.from + first, std::min(elements, part.count - first), part.to + first};
}

// Results replace elements of src if dst is src, so they are received when these have left.
void FlatTransfer::receive_results(Channel& channel) {
  const int64_t elements = kResultPieces * piece_elements_, width = zr::size_of(parts_.coll.dst.dtype);
  for (; results_ * elements < most_; ++results_) {
    if (left_ < to_send_.size() && to_send_[left_].first < (results_ + 1) * elements) return;
    for (int i = 1; i < parts_.world; ++i) {
      const int p = (parts_.rank + parts_.world - i) % parts_.world;
      const zr::Extent part = results_of(p, results_);
      if (part.count > 0)
        receive_part(channel, whole_, static_cast<char*>(parts_.coll.dst.data) + part.to * width, part.count * width, p,
                     Phase::results);
    }
  }
}

// The last pieces that this rank has reduced.
void FlatTransfer::send_results(Channel& channel) {
  const int64_t width = zr::size_of(parts_.coll.dst.dtype);
  const zr::Extent part = results_of(parts_.rank, (reduced_ - 1) / kResultPieces);
  for (int i = 1; i < parts_.world; ++i)
    send_part(channel, whole_, static_cast<const char*>(parts_.coll.dst.data) + part.to * width, part.count * width,
              (parts_.rank + i) % parts_.world, Phase::results);
}

bool FlatTransfer::advance(Channel& channel) {
  bool moved = false;
  if (parts_.is_reduction() && !has_reduced_) {
    moved = send_pieces(channel);
    while (reduce_pieces(channel)) moved = true;
    const bool sent = sent_ == to_send_.size() && std::all_of(sending_.begin(), sending_.end(),
                                                              [](MPI_Request r) { return r == MPI_REQUEST_NULL; });
    if (!sent || reduced_ < pieces_) return moved;
    channel.is_used = false;
    has_reduced_ = moved = true;
  }
  if (!whole_.complete(parts_.what())) return moved;
  is_complete_ = true;
  return true;
}

}  // namespace mpi
