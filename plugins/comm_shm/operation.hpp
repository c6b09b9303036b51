// One submitted operation on this rank.
#pragma once

#include <cstdint>

#include "control_block.hpp"
#include "zr/base.hpp"
#include "zr/collective_parts.hpp"

namespace shm {

using zr::Extent;
using zr::name_of_op;
using zr::shape_text;
using zr::size_of;

struct Operation : zr::CollectiveParts {
  enum class State { waiting, announced, executed, complete };

  /// Copies the arguments that are needed after the call. Throws ZR_INVALID with the label if counts, types or overlaps
  /// are wrong.
  void assign(const zr_coll& given, int own_rank, int ranks);
  /// True if `later` must not be announced before this operation is complete, because it uses memory that this
  /// operation writes, or writes memory that this operation reads.
  bool blocks(const Operation& later) const { return state != State::complete && conflicts(later); }

  State state = State::waiting;
  zr::Done done;
  uint64_t number = 0;         // sequence number of the collective, from 1
  Message* message = nullptr;  // for a send or receive, once it is matched
  enum class Finish {
    no_rank,
    root,
    all
  } finish = Finish::no_rank;  // an executed operation is complete when these ranks have done their part
  // Through the staging buffer: round number `round` of `rounds` is in progress, counted from first_round.
  bool staged = false, round_filled = false;
  uint64_t first_round = 0, round = 0, rounds = 0;
};

/// Rank r's share of n elements when the ranks divide a reduction; aligned to cache lines for every type.
Extent share(int64_t n, int r, int world);
/// How the ranks perform a collective (README.md).
enum class Route { nothing, pull, push, stage };
/// The memory of a collective, on all ranks together.
struct MemoryTraits {
  bool src_shared, dst_shared;  // peers can access every src that is read, every dst that is written
  bool in_place;                // src and dst overlap on a rank
};
Route route_of(const zr::CollectiveParts& parts, const MemoryTraits& memory);

}  // namespace shm
