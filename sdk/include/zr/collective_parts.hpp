// For communicators: the arguments of one operation, checked and copied, and which elements go from which rank to
// which.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "zr/abi/communicator.h"
#include "zr/base.hpp"
#include "zr/names.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// Elements that one rank's dst receives from another rank's src: `count` elements at `from` in src go to `to` in dst.
struct Extent {
  int64_t from = 0, count = 0, to = 0;  // in elements
};

/// " (fp32, 4096 elements)", for messages; "" for ZR_NONE.
inline std::string shape_text(zr_dtype dtype, int64_t elements) {
  if (dtype == ZR_NONE) return "";
  return " (" + std::string(name_of(dtype)) + ", " + std::to_string(elements) + " elements)";
}

/// True if the two ranges of bytes have a byte in common.
inline bool bytes_overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto* x = static_cast<const char*>(a);
  const auto* y = static_cast<const char*>(b);
  return a_bytes > 0 && b_bytes > 0 && x < y + b_bytes && y < x + a_bytes;
}

/// One operation on one rank. Copies what a communicator needs after submit() has returned; the views' memory is the
/// caller's.
class CollectiveParts {
 public:
  /// Replaces the operation. Throws ZR_INVALID with the label if counts, types or overlaps are wrong.
  void assign(const zr_coll& given, int own_rank, int ranks);

  bool is_message() const { return coll.op == ZR_SEND || coll.op == ZR_RECV; }  // not a collective
  /// The ranks' sources are added, or their minimum or maximum is taken.
  bool is_reduction() const { return coll.op == ZR_ALL_REDUCE || coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_REDUCE; }
  /// True if rank r's src is read.
  bool sends(int r) const {
    if (coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER) return r == coll.root;
    return coll.op != ZR_RECV && coll.op != ZR_BARRIER;
  }
  /// True if rank r's dst is written.
  bool receives(int r) const {
    if (coll.op == ZR_REDUCE || coll.op == ZR_GATHER) return r == coll.root;
    return coll.op != ZR_SEND && coll.op != ZR_BARRIER;
  }
  /// True if src is cut: each rank receives different elements of it.
  bool is_cut() const { return coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_SCATTER || coll.op == ZR_ALL_TO_ALL; }
  /// For plans: true unless this is an all_to_all in which ranks have different counts, as far as this rank knows.
  bool has_known_counts() const {
    if (coll.op != ZR_ALL_TO_ALL) return true;
    const int64_t own = counts[static_cast<size_t>(rank)];
    return std::all_of(recv_counts.begin(), recv_counts.end(), [&](int64_t count) { return count == own; });
  }
  /// The elements from rank p to rank r. For all_to_all, `to` are the counts of p and `from` the recv_counts of r;
  /// otherwise both may be null.
  Extent extent(int p, int r, const int64_t* to, const int64_t* from) const;
  /// Bytes of an element as it is communicated.
  int64_t width() const { return size_of(sends(rank) ? coll.src.dtype : coll.dst.dtype); }
  int64_t src_bytes() const { return coll.src.count * size_of(coll.src.dtype); }  // of this rank
  int64_t dst_bytes() const { return coll.dst.count * size_of(coll.dst.dtype); }  // of this rank
  /// True if this operation writes memory that `other` reads or writes, or reads memory that `other` writes.
  bool conflicts(const CollectiveParts& other) const { return writes_into(other) || other.writes_into(*this); }
  /// Elements of the operation, for reports.
  int64_t elements() const {
    if (!starts.empty() && coll.op != ZR_ALL_TO_ALL) return starts.back();
    return coll.op == ZR_BROADCAST || coll.op == ZR_RECV ? coll.dst.count : coll.src.count;
  }
  zr_dtype dtype() const { return receives(rank) ? coll.dst.dtype : coll.src.dtype; }  // for reports
  /// For reports: "all_reduce 'bucket 3'".
  std::string what() const { return std::string(name_of_op(coll.op)) + " '" + label + "'"; }

  zr_coll coll{};                                    // without counts and label
  std::vector<int64_t> counts, recv_counts, starts;  // by rank; starts: prefix sums of counts
  std::string label;                                 // for messages
  int rank = 0, world = 1;                           // this rank, and the number of ranks
  bool in_place = false;                             // src and dst overlap

 private:
  void check(bool ok, const char* why) const {
    if (!ok) throw PluginError(ZR_INVALID, what() + ": " + why);
  }
  void check_counts();
  void check_overlap();
  bool writes_into(const CollectiveParts& other) const {
    if (!receives(rank)) return false;
    const void* const dst = coll.dst.data;
    return (other.sends(rank) && bytes_overlap(dst, dst_bytes(), other.coll.src.data, other.src_bytes())) ||
           (other.receives(rank) && bytes_overlap(dst, dst_bytes(), other.coll.dst.data, other.dst_bytes()));
  }
};

inline Extent CollectiveParts::extent(int p, int r, const int64_t* to, const int64_t* from) const {
  switch (coll.op) {
    case ZR_REDUCE_SCATTER:
    case ZR_SCATTER: return {starts[r], counts[r], 0};
    case ZR_ALL_GATHER:
    case ZR_GATHER: return {0, counts[p], starts[p]};
    case ZR_ALL_TO_ALL:
      return {std::accumulate(to, to + r, int64_t{0}), to[r], std::accumulate(from, from + p, int64_t{0})};
    default: return {0, coll.op == ZR_BROADCAST ? coll.dst.count : coll.src.count, 0};
  }
}

inline void CollectiveParts::assign(const zr_coll& given, int own_rank, int ranks) {
  rank = own_rank;
  world = ranks;
  coll = given;
  label = given.label ? given.label : "";
  check(coll.op >= ZR_ALL_REDUCE && coll.op <= ZR_BARRIER, "unknown operation code");
  in_place = false;
  counts.clear();
  recv_counts.clear();
  starts.clear();
  if (coll.op == ZR_BARRIER) {
    coll.src = coll.dst = zr_view{};
    return;
  }
  check(!sends(rank) || (size_of(coll.src.dtype) && coll.src.count >= 0 && (coll.src.data || coll.src.count == 0)),
        "src is not a valid view");
  check(!receives(rank) || (size_of(coll.dst.dtype) && coll.dst.count >= 0 && (coll.dst.data || coll.dst.count == 0)),
        "dst is not a valid view");
  const bool both = sends(rank) && receives(rank),
             upcasts = coll.dst.dtype == ZR_F32 && (coll.src.dtype == ZR_BF16 || coll.src.dtype == ZR_F16);
  check(!both || coll.src.dtype == coll.dst.dtype || (is_reduction() && upcasts), "src and dst have different types");
  check(!is_reduction() || (coll.reduce >= ZR_SUM && coll.reduce <= ZR_MAX), "unknown reduction");
  const bool rooted = coll.op == ZR_BROADCAST || coll.op == ZR_REDUCE || coll.op == ZR_GATHER || coll.op == ZR_SCATTER;
  check(!rooted || (coll.root >= 0 && coll.root < world), "root is out of range");
  check(!is_message() || (coll.peer >= 0 && coll.peer < world && coll.peer != rank),
        "peer is out of range or this rank itself");
  check_counts();
  check_overlap();
}

inline void CollectiveParts::check_counts() {
  const bool parts = is_cut() || coll.op == ZR_ALL_GATHER || coll.op == ZR_GATHER;
  if (!parts) {
    check(!sends(rank) || !receives(rank) || coll.src.count == coll.dst.count, "src and dst have different lengths");
    return;
  }
  const bool by_src = coll.op == ZR_ALL_GATHER || coll.op == ZR_GATHER;
  const int64_t equal = coll.op == ZR_ALL_TO_ALL ? coll.src.count / world : by_src ? coll.src.count : coll.dst.count;
  counts.assign(static_cast<size_t>(world), equal);
  if (coll.counts) counts.assign(coll.counts, coll.counts + world);
  recv_counts = counts;
  if (coll.recv_counts) recv_counts.assign(coll.recv_counts, coll.recv_counts + world);
  coll.counts = coll.recv_counts = nullptr;
  for (const auto* list : {&counts, &recv_counts})
    check(std::all_of(list->begin(), list->end(), [](int64_t n) { return n >= 0; }), "a count is negative");
  starts.assign(1, 0);
  for (const int64_t n : counts) starts.push_back(starts.back() + n);
  const int64_t total = starts.back(), own_count = counts[static_cast<size_t>(rank)];
  if (sends(rank)) check(coll.src.count == (by_src ? own_count : total), "the length of src does not match the counts");
  if (!receives(rank)) return;
  const int64_t received = std::accumulate(recv_counts.begin(), recv_counts.end(), int64_t{0});
  check(coll.dst.count == (coll.op == ZR_ALL_TO_ALL ? received
                           : by_src                 ? total
                                                    : own_count),
        "the length of dst does not match the counts");
}

inline void CollectiveParts::check_overlap() {
  in_place = sends(rank) && receives(rank) && bytes_overlap(coll.src.data, src_bytes(), coll.dst.data, dst_bytes());
  if (!in_place) return;
  const auto* src = static_cast<const char*>(coll.src.data);
  const auto* dst = static_cast<const char*>(coll.dst.data);
  const int64_t own = starts.empty() ? 0 : starts[static_cast<size_t>(rank)] * size_of(coll.src.dtype);
  bool fits = false;
  switch (coll.op) {
    case ZR_REDUCE_SCATTER:
    case ZR_SCATTER: fits = dst == src + own; break;
    case ZR_ALL_GATHER:
    case ZR_GATHER: fits = src == dst + own; break;
    case ZR_ALL_TO_ALL: fits = src == dst && counts == recv_counts; break;
    default: fits = src == dst; break;
  }
  check(fits && coll.src.dtype == coll.dst.dtype, "src and dst overlap, but src is not dst's own range");
}

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
