#include <algorithm>

#include "shm_communicator.hpp"

namespace shm {

namespace {
using Finish = Operation::Finish;
constexpr int64_t kStreamedBytes = int64_t{2} << 20;  // bytes from which on non-temporal stores are faster
constexpr int64_t kParallelBytes = int64_t{1} << 20;  // bytes from which on several threads are faster
constexpr int64_t kCopyBlock = int64_t{64} << 10;

// The part of an extent that a round transfers.
Extent cut(const Extent& full, uint64_t round, int64_t round_elements) {
  const int64_t first = std::min(full.count, static_cast<int64_t>(round) * round_elements);
  return {full.from + first, std::min(round_elements, full.count - first), full.to + first};
}
}  // namespace

bool ShmCommunicator::execute(Operation& op) {
  if (op.staged) return through_staging(op);
  compare(op);
  switch (route(op)) {
    case Route::nothing: return true;
    case Route::push:
      push(op);
      op.finish = Finish::all;
      return true;
    case Route::pull:
      pull(op);
      if (op.sends(rank_)) op.finish = op.coll.op == ZR_GATHER || op.coll.op == ZR_REDUCE ? Finish::root : Finish::all;
      return true;
    case Route::stage:
      op.staged = true;
      op.first_round = rounds_done_;
      return through_staging(op);
  }
  return true;
}

void ShmCommunicator::compare(const Operation& op) {
  const Announcement& first = arena_.announcement(0, op.number);
  const auto call_of = [&](int r) {
    const Announcement& announcement = arena_.announcement(r, op.number);
    return arena_.name_of(r) + " issued " + std::string(name_of_op(announcement.op)) + " '" + announcement.label + "'" +
           shape_text(announcement.dtype, announcement.elements);
  };
  const auto differ = [&](int p, int r, const std::string& detail) {
    // Without op.number: the engine's numbers, which its report gives, count differently.
    fail(ZR_MISMATCH, "the ranks disagree about a collective: " + call_of(p) + ", " + call_of(r) + detail);
  };
  for (int r = 1; r < world_; ++r) {
    const Announcement& other = arena_.announcement(r, op.number);
    if (other.fingerprint != first.fingerprint || other.op != first.op) differ(0, r, "");
  }
  if (op.coll.op != ZR_ALL_TO_ALL) return;
  for (int p = 0; p < world_; ++p)
    for (int r = 0; r < world_; ++r) {
      const int64_t sent = arena_.announcement(p, op.number).to()[r],
                    expected = arena_.announcement(r, op.number).to()[world_ + p];
      if (sent != expected)
        differ(p, r,
               "; " + arena_.name_of(p) + " sends " + std::to_string(sent) + " elements to " + arena_.name_of(r) +
                   ", which expects " + std::to_string(expected));
    }
}

Route ShmCommunicator::route(const Operation& op) {
  MemoryTraits memory{true, true, false};
  for (int r = 0; r < world_; ++r) {
    const uint32_t traits = arena_.announcement(r, op.number).traits;
    memory.src_shared &= !op.sends(r) || (traits & kSrcShared);
    memory.dst_shared &= !op.receives(r) || (traits & kDstShared);
    memory.in_place |= (traits & kInPlace) != 0;
  }
  return route_of(op, memory);
}

Extent ShmCommunicator::extent(const Operation& op, int p, int r) const {
  if (op.coll.op != ZR_ALL_TO_ALL) return op.extent(p, r, nullptr, nullptr);
  return op.extent(p, r, arena_.announcement(p, op.number).to(), arena_.announcement(r, op.number).to() + world_);
}

const char* ShmCommunicator::source(const Operation& op, int p) {
  return p == rank_ ? static_cast<const char*>(op.coll.src.data) : arena_.at(p, arena_.announcement(p, op.number).src);
}
char* ShmCommunicator::destination(const Operation& op, int r) {
  return r == rank_ ? static_cast<char*>(op.coll.dst.data) : arena_.at(r, arena_.announcement(r, op.number).dst);
}

// This rank writes its own dst.
void ShmCommunicator::pull(const Operation& op) {
  if (!op.receives(rank_)) return;
  const int64_t size = op.width();
  if (op.is_reduction()) {
    const Extent own_part = extent(op, rank_, rank_);
    if (own_part.count == 0) return;
    sources_.clear();
    for (int p = 0; p < world_; ++p) sources_.push_back(source(op, p) + own_part.from * size);
    destinations_.assign(1, op.coll.dst.data);
    const bool rewrites = op.in_place || (op.coll.flags & ZR_COLL_ACCUMULATE);
    reduce(op, op.coll.dst.dtype, 0, own_part.count, !rewrites && op.dst_bytes() >= kStreamedBytes);
    return;
  }
  for (int i = 1; i <= world_; ++i) {
    const int p = (rank_ + i) % world_;  // start at different ranks, so that not all read from the same rank
    // This rank has read its peers' parts, so they need not wait for the rest.
    if (p == rank_) publish(&SharedCounters::finished, op.number);
    const Extent part = op.sends(p) ? extent(op, p, rank_) : Extent{};
    if (part.count == 0) continue;
    char* to = static_cast<char*>(op.coll.dst.data) + part.to * size;
    const char* from = source(op, p) + part.from * size;
    if (to != from) copy(to, from, part.count * size, op.dst_bytes() >= kStreamedBytes);
  }
}

// This rank reduces its share of the elements for all receivers.
void ShmCommunicator::push(const Operation& op) {
  const Extent own_part = share(op.coll.src.count, rank_, world_);
  if (own_part.count == 0) return;
  sources_.clear();
  destinations_.clear();
  bool in_place = false;
  for (int i = 0; i < world_; ++i) {
    const int r = (rank_ + i) % world_;
    sources_.push_back(source(op, i));
    if (op.receives(r)) destinations_.push_back(destination(op, r));
    in_place |= (arena_.announcement(r, op.number).traits & kInPlace) != 0;
  }
  const bool rewrites = in_place || (op.coll.flags & ZR_COLL_ACCUMULATE);
  const zr_dtype dst_dtype = arena_.announcement(op.coll.op == ZR_REDUCE ? op.coll.root : rank_, op.number).dst_dtype;
  reduce(op, dst_dtype, own_part.from, own_part.count,
         !rewrites && own_part.count * size_of(op.coll.src.dtype) >= kStreamedBytes);
}

// In rounds: every rank copies a part of its src into its staging buffer, then reads its part of all staging buffers.
bool ShmCommunicator::through_staging(Operation& op) {
  const int64_t size = op.width();
  const int64_t chunk = op.is_cut() ? arena_.staging_capacity() / world_ / 64 * 64 : arena_.staging_capacity();
  const int64_t round_elements = chunk / size;
  if (op.rounds == 0) op.rounds = rounds_of(op, round_elements);
  for (; op.round < op.rounds; ++op.round, op.round_filled = false) {
    const uint64_t number = op.first_round + op.round;
    if (!op.round_filled) {
      if (!all_reached(&SharedCounters::rounds_read, number)) return false;
      fill_staging(op, round_elements);
      op.round_filled = true;
      publish(&SharedCounters::rounds_filled, number + 1);
    }
    if (!all_reached(&SharedCounters::rounds_filled, number + 1)) return false;
    read_staging(op, round_elements);
    publish(&SharedCounters::rounds_read, number + 1);
  }
  rounds_done_ = op.first_round + op.rounds;
  return true;
}

uint64_t ShmCommunicator::rounds_of(const Operation& op, int64_t round_elements) {
  int64_t longest = 0;
  for (int p = 0; p < world_; ++p)
    for (int r = 0; r < world_; ++r)
      if (op.sends(p) && op.receives(r)) longest = std::max(longest, extent(op, p, r).count);
  return static_cast<uint64_t>((longest + round_elements - 1) / round_elements);
}

void ShmCommunicator::fill_staging(const Operation& op, int64_t round_elements) {
  if (!op.sends(rank_)) return;
  const int64_t size = size_of(op.coll.src.dtype);
  for (int r = 0; r < (op.is_cut() ? world_ : 1); ++r) {
    const Extent part = cut(extent(op, rank_, r), op.round, round_elements);
    copy(arena_.staging(rank_) + r * round_elements * size,
         static_cast<const char*>(op.coll.src.data) + part.from * size, part.count * size);
  }
}

void ShmCommunicator::read_staging(const Operation& op, int64_t round_elements) {
  if (!op.receives(rank_)) return;
  const int64_t size = op.width(), to_size = size_of(op.coll.dst.dtype);
  const int64_t chunk = op.is_cut() ? rank_ * round_elements * size : 0;
  sources_.clear();
  for (int p = 0; p < world_; ++p) {
    if (!op.sends(p)) continue;
    const Extent part = cut(extent(op, p, rank_), op.round, round_elements);
    sources_.push_back(arena_.staging(p) + chunk);
    destinations_.assign(1, static_cast<char*>(op.coll.dst.data) + part.to * to_size);
    if (!op.is_reduction())
      copy(destinations_[0], sources_.back(), part.count * size);
    else if (p == world_ - 1)
      reduce(op, op.coll.dst.dtype, 0, part.count, false);
  }
}

void ShmCommunicator::reduce(const Operation& op, zr_dtype dst_dtype, int64_t first, int64_t count, bool streams) {
  const zr::ReduceKind kind{op.coll.reduce, (op.coll.flags & ZR_COLL_ACCUMULATE) != 0, op.coll.src.dtype, dst_dtype};
  const auto n = static_cast<int32_t>(sources_.size()), n_destinations = static_cast<int32_t>(destinations_.size());
  const auto run = [&](int64_t at, int64_t elements) {
    reduce_(kind, sources_.data(), n, destinations_.data(), n_destinations, at, elements, streams);
  };
  const int64_t size = size_of(kind.src);
  if (count * size < kParallelBytes || threads() < 2) return run(first, count);
  const int64_t blocks = (count + zr::kReduceBlock - 1) / zr::kReduceBlock;
  tasks_.parallel_for(blocks, kCopyBlock / (zr::kReduceBlock * size), [&](int64_t begin, int64_t end) {
    run(first + begin * zr::kReduceBlock, std::min(count, end * zr::kReduceBlock) - begin * zr::kReduceBlock);
  });
}

void ShmCommunicator::copy(void* dst, const void* src, int64_t bytes, bool streams) {
  streams |= bytes >= kStreamedBytes;
  if (bytes == 0) return;  // an empty part may have no memory
  if (bytes < kParallelBytes || threads() < 2) return copy_(dst, src, bytes, streams);
  tasks_.parallel_for((bytes + kCopyBlock - 1) / kCopyBlock, 4, [&](int64_t begin, int64_t end) {
    copy_(static_cast<char*>(dst) + begin * kCopyBlock, static_cast<const char*>(src) + begin * kCopyBlock,
          std::min(bytes, end * kCopyBlock) - begin * kCopyBlock, streams);
  });
}

}  // namespace shm
