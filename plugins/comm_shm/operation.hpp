// One submitted operation on this rank, and its geometry: which elements go from which rank to which.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "control_block.hpp"
#include "zr/base.hpp"
#include "zr/names.hpp"

namespace shm {

using zr::name_of_op;
using zr::size_of;
/// " (fp32, 4096 elements)"; "" for ZR_NONE.
std::string shape_text(zr_dtype dtype, int64_t elements);

/// Elements that one rank's dst receives from another rank's src: `count` elements at `from` in src go to `to` in dst.
struct Extent {
  int64_t from = 0, count = 0, to = 0;
};

struct Operation {
  enum class State { waiting, announced, executed, complete };

  /// Copies the arguments that are needed after the call. Throws ZR_INVALID with the label if counts, types or overlaps
  /// are wrong.
  void assign(const zr_coll& given, int rank, int world);

  bool is_message() const { return coll.op == ZR_SEND || coll.op == ZR_RECV; }
  bool is_reduction() const { return coll.op == ZR_ALL_REDUCE || coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_REDUCE; }
  /// sends: rank r's src is read. receives: rank r's dst is written.
  bool sends(int r) const;
  bool receives(int r) const;
  /// True if src is cut: each rank receives different elements of it.
  bool is_cut() const { return coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_SCATTER || coll.op == ZR_ALL_TO_ALL; }
  /// The elements from rank p to rank r. For all_to_all, `to` and `from` are the announced counts of p and of r.
  Extent extent(int p, int r, const int64_t* to, const int64_t* from) const;
  /// Bytes of an element as it is communicated.
  int64_t width() const { return size_of(sends(rank) ? coll.src.dtype : coll.dst.dtype); }
  int64_t src_bytes() const { return coll.src.count * size_of(coll.src.dtype); }
  int64_t dst_bytes() const { return coll.dst.count * size_of(coll.dst.dtype); }
  /// True if `later` must not be announced before this operation is complete, because it uses memory that this
  /// operation writes, or writes memory that this operation reads.
  bool blocks(const Operation& later) const;
  /// Elements and type of the operation, for reports.
  int64_t elements() const;
  zr_dtype dtype() const { return receives(rank) ? coll.dst.dtype : coll.src.dtype; }
  std::string what() const;  // "all_reduce 'bucket 3'"

  zr_coll coll{};
  std::vector<int64_t> counts, recv_counts, starts;  // by rank; starts: prefix sums of counts
  std::string label;
  int rank = 0, world = 1;
  bool in_place = false;

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

 private:
  void check(bool ok, const char* why) const;
  void check_counts();
  void check_overlap();
};

}  // namespace shm
