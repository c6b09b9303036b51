#include "comm/compose.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/dtype.hpp"
#include "comm/coll.hpp"
#include "comm/fold.hpp"

namespace zr::host {

namespace {

// Every rank's source, each in a row of equal length; sources of other lengths are padded.
class Rows {
 public:
  Rows(const zr_view& mine, int64_t length, int world, const AllGather& gather) : row_bytes_(length * size_of(mine.dtype)) {
    memory_.resize(static_cast<std::size_t>(row_bytes_ * (world + 1)));
    if (mine.count > 0) std::memcpy(memory_.data() + row_bytes_ * world, mine.data, static_cast<std::size_t>(mine.count * size_of(mine.dtype)));
    const zr_view own{memory_.data() + row_bytes_ * world, length, mine.dtype, 0, {1, 0}};
    gather(own, {memory_.data(), length * world, mine.dtype, 0, {1, 0}});
  }
  const char* row(int rank) const { return memory_.data() + row_bytes_ * rank; }

 private:
  int64_t row_bytes_;
  std::vector<char> memory_;
};

void copy(const zr_view& dst, int64_t first, const char* from, int64_t count) {
  if (count > 0) std::memcpy(bytes_of(dst) + first * size_of(dst.dtype), from, static_cast<std::size_t>(count * size_of(dst.dtype)));
}

std::string reduce(const zr_coll& coll, int rank, int world, const AllGather& gather) {
  const Rows rows(coll.src, coll.src.count, world, gather);
  const auto parts = parts_of(coll.op == ZR_REDUCE_SCATTER ? coll.counts : nullptr, coll.src.count, world);
  const int64_t first = coll.op == ZR_REDUCE_SCATTER ? std::accumulate(parts.begin(), parts.begin() + rank, int64_t{0}) : 0;
  if (coll.op == ZR_REDUCE && rank != coll.root) return "";
  std::vector<const void*> sources;
  for (int r = 0; r < world; ++r) sources.push_back(rows.row(r) + first * size_of(coll.src.dtype));
  if (!fold(coll.dst, sources, coll.src.dtype, coll.reduce, coll.flags & ZR_COLL_ACCUMULATE))
    return "cannot fold " + std::string(name_of(coll.src.dtype)) + " into " + std::string(name_of(coll.dst.dtype));
  return "";
}

}  // namespace

std::string compose(const zr_coll& coll, int rank, int world, const AllGather& gather) {
  const auto own = static_cast<std::size_t>(rank);
  switch (coll.op) {
    case ZR_BARRIER: {
      zr_view none{nullptr, 0, ZR_U8, 0, {1, 0}};
      char byte = 0;
      std::vector<char> all(static_cast<std::size_t>(world));
      none = {&byte, 1, ZR_U8, 0, {1, 0}};
      gather(none, {all.data(), world, ZR_U8, 0, {1, 0}});
      return "";
    }
    case ZR_ALL_REDUCE:
    case ZR_REDUCE_SCATTER:
    case ZR_REDUCE: return reduce(coll, rank, world, gather);
    case ZR_ALL_GATHER:
    case ZR_GATHER: {
      const auto parts = parts_of(coll.counts, total_of(coll, rank, world), world);
      const Rows rows(coll.src, *std::max_element(parts.begin(), parts.end()), world, gather);
      if (coll.op == ZR_GATHER && rank != coll.root) return "";
      int64_t first = 0;
      for (int r = 0; r < world; first += parts[static_cast<std::size_t>(r++)]) copy(coll.dst, first, rows.row(r), parts[static_cast<std::size_t>(r)]);
      return "";
    }
    case ZR_BROADCAST: {
      const Rows rows(rank == coll.root ? coll.src : zr_view{nullptr, 0, coll.dst.dtype, 0, {1, 0}}, coll.dst.count, world, gather);
      copy(coll.dst, 0, rows.row(coll.root), coll.dst.count);
      return "";
    }
    case ZR_SCATTER: {
      const int64_t total = total_of(coll, rank, world);
      const auto parts = parts_of(coll.counts, total, world);
      const Rows rows(rank == coll.root ? coll.src : zr_view{nullptr, 0, coll.dst.dtype, 0, {1, 0}}, total, world, gather);
      const int64_t first = std::accumulate(parts.begin(), parts.begin() + rank, int64_t{0});
      copy(coll.dst, 0, rows.row(coll.root) + first * size_of(coll.dst.dtype), parts[own]);
      return "";
    }
    case ZR_ALL_TO_ALL: {
      // What goes to whom differs by rank: the counts travel first.
      const auto mine = parts_of(coll.counts, coll.src.count, world);
      const Rows counts({const_cast<int64_t*>(mine.data()), world, ZR_I64, 0, {1, 0}}, world, world, gather);
      int64_t longest = 0;
      std::vector<std::vector<int64_t>> all;
      for (int r = 0; r < world; ++r) {
        const auto* row = reinterpret_cast<const int64_t*>(counts.row(r));
        all.emplace_back(row, row + world);
        longest = std::max(longest, std::accumulate(row, row + world, int64_t{0}));
      }
      const Rows rows(coll.src, longest, world, gather);
      int64_t at = 0;
      for (int r = 0; r < world; ++r) {
        const auto& theirs = all[static_cast<std::size_t>(r)];
        const int64_t first = std::accumulate(theirs.begin(), theirs.begin() + rank, int64_t{0});
        copy(coll.dst, at, rows.row(r) + first * size_of(coll.src.dtype), theirs[own]);
        at += theirs[own];
      }
      return "";
    }
    default: return std::string(name_of_op(coll.op)) + " is not offered by this communicator and cannot be made of all-gathers";
  }
}

}  // namespace zr::host
