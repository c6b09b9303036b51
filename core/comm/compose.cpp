#include "comm/compose.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/dtype.hpp"
#include "comm/coll.hpp"
#include "comm/ordered_reduce.hpp"

namespace zr::host::comm {

namespace {

class Composition {
 public:
  Composition(const zr_coll& coll, const Primitives& primitives)
      : coll_(coll),
        primitives_(primitives),
        rank_(primitives.rank),
        world_(primitives.world),
        dtype_(reads_src(coll, primitives.rank) ? coll.src.dtype : coll.dst.dtype),
        size_(size_of(dtype_)) {}

  void reduce();
  void all_reduce();
  void reduce_scatter();
  void reduce_scatter_by_exchange();
  void gather();
  void scatter();
  void broadcast() { broadcast_part(coll_.root, coll_.src, coll_.dst.data, coll_.dst.count); }
  void all_to_all();
  void barrier();

 private:
  // Elements per part if the staging buffer is divided into n parts.
  int64_t elements_per_part(int n) const {
    return std::max<int64_t>(1, primitives_.staging_bytes / (size_ * n) / 64 * 64);
  }
  char* staging(int64_t elements = 0) const { return primitives_.staging + elements * size_; }
  zr_view view(void* data, int64_t count) const { return {data, count, dtype_, 0, {1, 0}}; }
  static char* at(const zr_view& v, int64_t first) { return bytes_of(v) + first * size_of(v.dtype); }

  void all_gather(const zr_view& src, const zr_view& dst, const int64_t* counts = nullptr) const {
    zr_coll coll{};
    coll.op = ZR_ALL_GATHER;
    coll.src = src;
    coll.dst = dst;
    coll.counts = counts;
    primitives_.run(coll);
  }
  void all_gather(const zr_view& src, void* dst, const std::vector<int64_t>& counts) const {
    all_gather(src, view(dst, std::accumulate(counts.begin(), counts.end(), int64_t{0})), counts.data());
  }
  // Sends `count` elements of the source of rank p to `to` on all ranks. `src` is read only on p.
  void broadcast_part(int p, const zr_view& src, void* to, int64_t count) const {
    std::vector<int64_t> counts(static_cast<std::size_t>(world_), 0);
    counts[static_cast<std::size_t>(p)] = count;
    all_gather(rank_ == p ? view(src.data, count) : view(to, 0), to, counts);
  }
  // Gathers elements [first, first + count) of every source. If `reduces`, reduces them into dst from element `to` on.
  void reduce_range(int64_t first, int64_t count, bool reduces, int64_t to) const {
    all_gather(view(at(coll_.src, first), count), staging(),
               std::vector<int64_t>(static_cast<std::size_t>(world_), count));
    if (!reduces) return;
    std::vector<const void*> rows;
    for (int r = 0; r < world_; ++r) rows.push_back(staging(r * count));
    ordered_reduce(primitives_.pool, coll_, part_of(coll_.dst, to, count), rows);
  }
  void copy(void* to, const void* from, int64_t count) const {
    if (count > 0) std::memmove(to, from, static_cast<std::size_t>(count * size_));
  }

  const zr_coll& coll_;
  const Primitives& primitives_;
  const int rank_, world_;
  const zr_dtype dtype_;
  const int64_t size_;
};

void Composition::reduce() {
  const int64_t limit = elements_per_part(world_), total = coll_.src.count;
  for (int64_t first = 0; first < total; first += limit)
    reduce_range(first, std::min(limit, total - first), writes_dst(coll_, rank_), first);
}

// Each rank reduces a part, which all then gather. With ACCUMULATE, the results of the ranks differ.
void Composition::all_reduce() {
  if (!primitives_.all_to_all || (coll_.flags & ZR_COLL_ACCUMULATE)) return reduce();
  const int64_t total = coll_.src.count;
  const auto cut = [&](int r) { return total * r / world_; };
  std::vector<int64_t> counts;
  for (int r = 0; r < world_; ++r) counts.push_back(cut(r + 1) - cut(r));
  zr_coll sum = coll_;
  sum.op = ZR_REDUCE_SCATTER;
  sum.counts = counts.data();
  sum.dst = part_of(coll_.dst, cut(rank_), counts[static_cast<std::size_t>(rank_)]);
  Composition(sum, primitives_).reduce_scatter_by_exchange();
  all_gather(sum.dst, coll_.dst, counts.data());
}

void Composition::reduce_scatter() {
  if (primitives_.all_to_all) return reduce_scatter_by_exchange();
  const int64_t limit = elements_per_part(world_), total = coll_.src.count;
  for (int r = 0; r < world_; ++r) {
    const ElementRange part = part_of_rank(coll_.counts, total, r, world_);
    for (int64_t done = 0; done < part.count; done += limit)
      reduce_range(part.first + done, std::min(limit, part.count - done), r == rank_, done);
  }
}

// Each rank receives only its own part of the sources of all ranks.
void Composition::reduce_scatter_by_exchange() {
  const int64_t limit = elements_per_part(2 * world_), total = coll_.src.count;
  int64_t largest_part = 0;
  for (int r = 0; r < world_; ++r)
    largest_part = std::max(largest_part, part_of_rank(coll_.counts, total, r, world_).count);
  for (int64_t done = 0; done < largest_part; done += limit) {
    std::vector<int64_t> to, from;
    int64_t packed = 0;
    for (int r = 0; r < world_; ++r) {
      const ElementRange part = part_of_rank(coll_.counts, total, r, world_);
      to.push_back(std::clamp<int64_t>(part.count - done, 0, limit));
      copy(staging(packed), at(coll_.src, part.first + std::min(done, part.count)), to.back());
      packed += to.back();
    }
    const int64_t count = to[static_cast<std::size_t>(rank_)];
    from.assign(static_cast<std::size_t>(world_), count);
    zr_coll exchange{};
    exchange.op = ZR_ALL_TO_ALL;
    exchange.src = view(staging(), packed);
    exchange.dst = view(staging(world_ * limit), count * world_);
    exchange.counts = to.data();
    exchange.recv_counts = from.data();
    primitives_.run(exchange);
    if (count == 0) continue;
    std::vector<const void*> rows;
    for (int r = 0; r < world_; ++r) rows.push_back(staging(world_ * limit + r * count));
    ordered_reduce(primitives_.pool, coll_, part_of(coll_.dst, done, count), rows);
  }
}

void Composition::gather() {
  const int64_t limit = elements_per_part(world_), total = total_of(coll_, world_);
  int64_t largest_part = 0;
  for (int r = 0; r < world_; ++r)
    largest_part = std::max(largest_part, part_of_rank(coll_.counts, total, r, world_).count);
  const ElementRange part = part_of_rank(coll_.counts, total, rank_, world_);
  for (int64_t done = 0; done < largest_part; done += limit) {
    std::vector<int64_t> counts;
    for (int r = 0; r < world_; ++r)
      counts.push_back(std::clamp<int64_t>(part_of_rank(coll_.counts, total, r, world_).count - done, 0, limit));
    all_gather(view(at(coll_.src, std::min(done, part.count)), counts[static_cast<std::size_t>(rank_)]), staging(),
               counts);
    if (!writes_dst(coll_, rank_)) continue;
    int64_t from = 0;
    for (int r = 0; r < world_; ++r) {
      const int64_t count = counts[static_cast<std::size_t>(r)];
      copy(at(coll_.dst, part_of_rank(coll_.counts, total, r, world_).first + done), staging(from), count);
      from += count;
    }
  }
}

void Composition::scatter() {
  const int64_t limit = elements_per_part(1), total = total_of(coll_, world_);
  for (int r = 0; r < world_; ++r) {
    const ElementRange part = part_of_rank(coll_.counts, total, r, world_);
    if (r == coll_.root) {
      if (r == rank_) copy(coll_.dst.data, at(coll_.src, part.first), part.count);
      continue;
    }
    for (int64_t done = 0; done < part.count; done += limit) {
      const int64_t count = std::min(limit, part.count - done);
      broadcast_part(coll_.root, rank_ == coll_.root ? part_of(coll_.src, part.first + done, count) : zr_view{},
                     staging(), count);
      if (r == rank_) copy(at(coll_.dst, done), staging(), count);
    }
  }
}

void Composition::all_to_all() {
  // The counts differ between ranks, so they are gathered first.
  const auto n = static_cast<std::size_t>(world_);
  std::vector<int64_t> sent(n), sent_by_all(n * n);
  for (int r = 0; r < world_; ++r)
    sent[static_cast<std::size_t>(r)] = part_of_rank(coll_.counts, coll_.src.count, r, world_).count;
  all_gather({sent.data(), world_, ZR_I64, 0, {1, 0}},
             {sent_by_all.data(), int64_t{world_} * world_, ZR_I64, 0, {1, 0}});
  // In place, received data would overwrite data that is not yet sent, so src is copied.
  std::vector<char> src_copy(bytes_of(coll_.src),
                             bytes_of(coll_.src) + (coll_.src.data == coll_.dst.data ? coll_.src.count * size_ : 0));
  const zr_view src = src_copy.empty() ? coll_.src : view(src_copy.data(), coll_.src.count);
  const int64_t limit = elements_per_part(1);
  int64_t to = 0;
  for (int p = 0; p < world_; ++p) {
    const int64_t* row = sent_by_all.data() + static_cast<std::size_t>(p) * n;
    int64_t first = 0;
    for (int r = 0; r < world_; first += row[r++])
      for (int64_t done = 0; done < row[r]; done += limit) {
        const int64_t count = std::min(limit, row[r] - done);
        broadcast_part(p, rank_ == p ? part_of(src, first + done, count) : zr_view{}, staging(), count);
        if (r == rank_) copy(at(coll_.dst, to + done), staging(), count);
      }
    to += row[rank_];
  }
}

void Composition::barrier() {
  std::vector<char> bytes(static_cast<std::size_t>(world_) + 1);
  all_gather({bytes.data() + world_, 1, ZR_U8, 0, {1, 0}}, {bytes.data(), world_, ZR_U8, 0, {1, 0}});
}

}  // namespace

std::string compose(const zr_coll& coll, const Primitives& primitives) {
  Composition composition(coll, primitives);
  switch (coll.op) {
    case ZR_ALL_REDUCE: composition.all_reduce(); break;
    case ZR_REDUCE: composition.reduce(); break;
    case ZR_REDUCE_SCATTER: composition.reduce_scatter(); break;
    case ZR_ALL_GATHER: primitives.run(coll); break;  // of a dtype that the plug-in does not support
    case ZR_GATHER: composition.gather(); break;
    case ZR_BROADCAST: composition.broadcast(); break;
    case ZR_SCATTER: composition.scatter(); break;
    case ZR_ALL_TO_ALL: composition.all_to_all(); break;
    case ZR_BARRIER: composition.barrier(); break;
    default:
      return fmt::format("{} is not supported by the communicator and cannot be composed of collectives",
                         name_of_op(coll.op));
  }
  return "";
}

}  // namespace zr::host::comm
