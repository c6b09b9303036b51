// One submitted operation on this rank, and its geometry: which elements go from whom to whom.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "control_block.hpp"
#include "zr/base.hpp"

namespace shm {

/// Bytes of one element; 0 if there is no such type.
int64_t size_of(zr_dtype dtype);
const char* name_of(zr_dtype dtype);
const char* name_of_op(uint32_t op);
/// " (fp32, 4096 elements)"; "" for no type.
std::string shape_text(zr_dtype dtype, int64_t elements);

/// Elements that travel from one rank's src to another's dst.
struct Extent {
  int64_t from = 0, count = 0, to = 0;
};

struct Operation {
  enum class State { waiting, announced, executed, complete };

  /// Copies what must outlive the call; throws ZR_INVALID naming the label if counts, types or overlaps are wrong.
  void assign(const zr_coll& given, int rank, int world);

  bool is_message() const { return coll.op == ZR_SEND || coll.op == ZR_RECV; }
  bool is_reduction() const { return coll.op == ZR_ALL_REDUCE || coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_REDUCE; }
  /// Rank r's src is read, its dst is written.
  bool sends(int r) const;
  bool receives(int r) const;
  /// A rank's src is cut: other elements go to every rank.
  bool is_cut() const { return coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_SCATTER || coll.op == ZR_ALL_TO_ALL; }
  /// From p to r. to, from: all_to_all's counts of p and of r, as announced.
  Extent extent(int p, int r, const int64_t* to, const int64_t* from) const;
  /// Bytes of an element as it travels.
  int64_t width() const { return size_of(sends(rank) ? coll.src.dtype : coll.dst.dtype); }
  int64_t src_bytes() const { return coll.src.count * size_of(coll.src.dtype); }
  int64_t dst_bytes() const { return coll.dst.count * size_of(coll.dst.dtype); }
  /// `later` must not be announced before this is complete: it touches what this one writes, or writes what this one
  /// reads.
  bool blocks(const Operation& later) const;
  /// Of the whole operation, as reports name it.
  int64_t elements() const;
  zr_dtype dtype() const { return receives(rank) ? coll.dst.dtype : coll.src.dtype; }
  std::string what() const;  // "all_reduce 'bucket 3'"

  zr_coll coll{};
  std::vector<int64_t> counts, recv_counts, starts;  // by rank; starts: of counts
  std::string label;
  int rank = 0, world = 1;
  bool in_place = false;

  State state = State::waiting;
  zr::Done done;
  uint64_t number = 0;         // of the collective, from 1
  Message* message = nullptr;  // of a message, once it is matched
  enum class Finish {
    nobody,
    root,
    all
  } finish = Finish::nobody;  // executed: complete when these have done their part
  // Through the staging room: load of loads is at work, counted from first_load.
  bool staged = false, loaded = false;
  uint64_t first_load = 0, load = 0, loads = 0;

 private:
  void check(bool ok, const char* why) const;
  void check_counts();
  void check_overlap();
};

}  // namespace shm
