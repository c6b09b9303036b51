#include "comm/coll.hpp"

#include <xxhash.h>

#include <array>
#include <charconv>
#include <cstring>
#include <numeric>

#include "base/dtype.hpp"

namespace zr::host {

std::string_view name_of_op(uint32_t op) {
  static constexpr std::array<std::string_view, 12> names{"nothing", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                                          "gather",  "scatter",    "all_to_all",     "send",       "recv",      "barrier"};
  return op < names.size() ? names[op] : "unknown";
}

int64_t total_of(const zr_coll& coll, int rank, int world) {
  switch (coll.op) {
    case ZR_ALL_GATHER: return coll.dst.count;
    case ZR_BROADCAST:
    case ZR_RECV: return coll.dst.count;
    case ZR_GATHER: return coll.counts ? std::accumulate(coll.counts, coll.counts + world, int64_t{0}) : coll.src.count * world;
    case ZR_SCATTER: return coll.counts ? std::accumulate(coll.counts, coll.counts + world, int64_t{0}) : coll.dst.count * world;
    case ZR_BARRIER: return 0;
    default: (void)rank; return coll.src.count;
  }
}

std::vector<int64_t> parts_of(const int64_t* counts, int64_t total, int world) {
  if (counts) return {counts, counts + world};
  return std::vector<int64_t>(static_cast<std::size_t>(world), total / world);
}

uint64_t fingerprint_of(const zr_coll& coll, int rank, int world) {
  if (coll.op == ZR_SEND || coll.op == ZR_RECV) return 0;
  const bool same_everywhere = coll.op != ZR_ALL_TO_ALL;
  const bool has_dst = coll.op == ZR_ALL_REDUCE || coll.op == ZR_REDUCE_SCATTER;
  struct {
    int64_t total;
    uint32_t op, reduce, flags;
    int32_t src, dst, root;
  } words{same_everywhere ? total_of(coll, rank, world) : 0, coll.op, coll.reduce, coll.flags,
          coll.op == ZR_BARRIER ? 0 : coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER ? coll.dst.dtype : coll.src.dtype, has_dst ? coll.dst.dtype : 0, coll.root};
  uint64_t hash = XXH3_64bits(&words, sizeof words);
  if (coll.counts && same_everywhere) hash = XXH3_64bits_withSeed(coll.counts, static_cast<std::size_t>(world) * 8, hash);
  if (coll.label) hash = XXH3_64bits_withSeed(coll.label, std::strlen(coll.label), hash);
  return hash ? hash : 1;
}

void describe(const zr_coll& coll, int64_t total, std::string& text) {
  text.assign(name_of_op(coll.op));
  text += " '";
  text += coll.label ? coll.label : "";
  text += "'";
  if (coll.op == ZR_BARRIER) return;
  text += " (";
  text += name_of(coll.src.dtype ? coll.src.dtype : coll.dst.dtype);
  text += ", ";
  char digits[24];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, total).ptr);
  text += " elements)";
}

int64_t received_bytes(const zr_coll& coll, int rank, int world, const std::function<int64_t(const zr_view&)>& live) {
  const int64_t others = world - 1, from = size_of(coll.src.dtype), to = size_of(coll.dst.dtype);
  switch (coll.op) {
    case ZR_ALL_REDUCE: {  // a reduce-scatter in equal parts, then an all-gather
      const int64_t n = coll.dst.count, own = n * (rank + 1) / world - n * rank / world;
      return others * own * from + (n - own) * to;
    }
    case ZR_REDUCE_SCATTER: return others * live(coll.dst) * from;
    case ZR_REDUCE: return rank == coll.root ? others * live(coll.dst) * from : 0;
    case ZR_ALL_GATHER:
    case ZR_GATHER: {
      if (coll.op == ZR_GATHER && rank != coll.root) return 0;
      const auto parts = parts_of(coll.counts, coll.dst.count, world);
      const int64_t first = std::accumulate(parts.begin(), parts.begin() + rank, int64_t{0});
      return (live(coll.dst) - live(part_of(coll.dst, first, parts[static_cast<std::size_t>(rank)]))) * to;
    }
    case ZR_BROADCAST:
    case ZR_SCATTER: return rank == coll.root ? 0 : live(coll.dst) * to;
    case ZR_ALL_TO_ALL: {
      const auto parts = parts_of(coll.recv_counts ? coll.recv_counts : coll.counts, coll.dst.count, world);
      return (coll.dst.count - parts[static_cast<std::size_t>(rank)]) * to;
    }
    case ZR_RECV: return coll.dst.count * to;
    default: return 0;
  }
}

}  // namespace zr::host
