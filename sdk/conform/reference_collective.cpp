#include "conform/reference_collective.hpp"

#include <cstring>
#include <numeric>
#include <type_traits>

#include "conform/text.hpp"
#include "zr/float_cast.hpp"
#include "zr/names.hpp"

namespace zr::conform {

RankCollective::RankCollective(const zr_coll& given, int world) {
  ZR_TAKE(&coll, &given);
  if (coll.counts) counts.assign(coll.counts, coll.counts + world);
  if (coll.recv_counts) recv_counts.assign(coll.recv_counts, coll.recv_counts + world);
  label = coll.label ? coll.label : "";
  coll.counts = coll.recv_counts = nullptr;
  coll.label = nullptr;
}

bool is_reduction(uint32_t op) { return op == ZR_ALL_REDUCE || op == ZR_REDUCE_SCATTER || op == ZR_REDUCE; }
bool reads_src(const zr_coll& coll, int rank) {
  if (coll.op == ZR_BROADCAST || coll.op == ZR_SCATTER) return rank == coll.root;
  return coll.op != ZR_RECV && coll.op != ZR_BARRIER;
}
bool writes_dst(const zr_coll& coll, int rank) {
  if (coll.op == ZR_REDUCE || coll.op == ZR_GATHER) return rank == coll.root;
  return coll.op != ZR_SEND && coll.op != ZR_BARRIER;
}

namespace {

int64_t sum_of(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// The parts of `total` elements by rank.
std::vector<int64_t> parts_of(const std::vector<int64_t>& counts, int64_t total, std::size_t world) {
  return counts.empty() ? std::vector<int64_t>(world, total / static_cast<int64_t>(world)) : counts;
}
int64_t start_of(const std::vector<int64_t>& parts, std::size_t rank) {
  return std::accumulate(parts.begin(), parts.begin() + static_cast<long>(rank), int64_t{0});
}

// ---- one element

template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
void store(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}
float load_float(zr_dtype dtype, const char* at) {
  if (dtype == ZR_F32) return load<float>(at);
  return dtype == ZR_BF16 ? from_bf16(load<uint16_t>(at)) : from_f16(load<uint16_t>(at));
}
void store_float(zr_dtype dtype, char* at, float value) {
  if (dtype == ZR_F32) return store(at, value);
  store(at, dtype == ZR_BF16 ? to_bf16(value) : to_f16(value));
}
int64_t load_integer(zr_dtype dtype, const char* at) {
  switch (dtype) {
    case ZR_I8: return load<int8_t>(at);
    case ZR_U8: return load<uint8_t>(at);
    case ZR_I32: return load<int32_t>(at);
    default: return load<int64_t>(at);
  }
}
void store_integer(zr_dtype dtype, char* at, int64_t value) {
  if (dtype == ZR_I64) return store(at, value);
  if (dtype == ZR_I32) return store(at, static_cast<int32_t>(value));
  store(at, static_cast<int8_t>(value));
}

template <class T>
T combine(uint32_t reduce, T a, T b) {
  if (reduce == ZR_MIN) return b < a ? b : a;
  if (reduce == ZR_MAX) return b > a ? b : a;
  if constexpr (std::is_same_v<T, int64_t>)
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  return a + b;
}

// Reduces one element of every source, in rank order, into the element at `to`.
void reduce_element(const zr_coll& coll, zr_dtype src, const std::vector<const char*>& sources, char* to) {
  const zr_dtype dst = coll.dst.dtype;
  const auto reduce_all = [&](auto zero, auto read_dst, auto read) {
    std::size_t next = 0;
    auto value = zero;
    if (coll.flags & ZR_COLL_ACCUMULATE)
      value = read_dst(to);
    else if (coll.reduce != ZR_SUM)
      value = read(sources[next++]);
    for (; next < sources.size(); ++next) value = combine(coll.reduce, value, read(sources[next]));
    return value;
  };
  if (dst == ZR_F64)
    store(to, reduce_all(0.0, load<double>, load<double>));
  else if (dst == ZR_F32 || dst == ZR_BF16 || dst == ZR_F16)
    store_float(dst, to,
                reduce_all(
                    0.0f, [&](const char* at) { return load_float(dst, at); },
                    [&](const char* at) { return load_float(src, at); }));
  else
    store_integer(dst, to,
                  reduce_all(
                      int64_t{0}, [&](const char* at) { return load_integer(dst, at); },
                      [&](const char* at) { return load_integer(src, at); }));
}

struct Sources {
  std::vector<std::string> bytes;  // of every rank's src, copied because an operation may be in place
  zr_dtype dtype = ZR_U8;
};

void reduce_all_elements(const std::vector<RankCollective>& ranks, const Sources& sources) {
  const int64_t width = size_of(sources.dtype);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const zr_coll& coll = ranks[r].coll;
    if (!writes_dst(coll, static_cast<int>(r))) continue;
    const auto parts = parts_of(ranks[r].counts, coll.src.count, ranks.size());
    const int64_t first = coll.op == ZR_REDUCE_SCATTER ? start_of(parts, r) : 0;
    std::vector<const char*> elements(ranks.size());
    for (int64_t i = 0; i < coll.dst.count; ++i) {
      for (std::size_t s = 0; s < ranks.size(); ++s) elements[s] = sources.bytes[s].data() + (first + i) * width;
      reduce_element(coll, sources.dtype, elements, static_cast<char*>(coll.dst.data) + i * size_of(coll.dst.dtype));
    }
  }
}

void move_elements(const std::vector<RankCollective>& ranks, const Sources& sources) {
  const std::size_t world = ranks.size();
  const int64_t width = size_of(sources.dtype);
  for (std::size_t r = 0; r < world; ++r) {
    const zr_coll& coll = ranks[r].coll;
    if (!writes_dst(coll, static_cast<int>(r))) continue;
    int64_t at = 0;
    for (std::size_t from = 0; from < world; ++from) {
      if (!reads_src(coll, static_cast<int>(from))) continue;
      int64_t first = 0, n = ranks[from].coll.src.count;
      if (coll.op == ZR_SCATTER || coll.op == ZR_ALL_TO_ALL) {
        const auto parts = parts_of(ranks[from].counts, ranks[from].coll.src.count, world);
        first = start_of(parts, r);
        n = parts[r];
      }
      const auto host_of = [&](std::size_t rank) {
        return host_of_rank(static_cast<int>(rank), static_cast<int>(world));
      };
      const bool is_there = (coll.flags & ZR_COLL_SHARED) && host_of(from) == host_of(r);
      if (n > 0 && !is_there)
        std::memcpy(static_cast<char*>(coll.dst.data) + at * width, sources.bytes[from].data() + first * width,
                    static_cast<std::size_t>(n * width));
      at += n;
    }
  }
}

std::string length_problem(const char* name, int64_t actual, int64_t expected) {
  return actual == expected ? "" : concat(name, " has ", actual, " elements, not ", expected);
}

// Of one rank.
std::string problem_of(const RankCollective& given, int rank, int world) {
  const zr_coll& coll = given.coll;
  if (coll.op < ZR_ALL_REDUCE || coll.op > ZR_BARRIER) return concat("operation code ", coll.op, " is not defined");
  if (coll.flags & ~(uint32_t{ZR_COLL_ACCUMULATE} | ZR_COLL_GRADIENTS | ZR_COLL_WEIGHTS | ZR_COLL_SHARED))
    return concat("flags is ", coll.flags, ", with unknown bits");
  if (coll.rsv != 0) return "rsv is not 0";
  if (coll.op == ZR_BARRIER) return "";
  if (is_reduction(coll.op) && (coll.reduce < ZR_SUM || coll.reduce > ZR_MAX))
    return concat("reduction code ", coll.reduce, " is not defined");
  for (const auto& [used, view] : {std::pair{reads_src(coll, rank), coll.src}, {writes_dst(coll, rank), coll.dst}})
    if (used && (size_of(view.dtype) == 0 || view.count < 0 || view.flags != 0 || (view.count > 0 && !view.data) ||
                 view.device.type != ZR_DEVICE_CPU))
      return "a view has an unknown dtype, flags, another device, or no memory";
  if ((coll.op >= ZR_BROADCAST && coll.op <= ZR_SCATTER) && (coll.root < 0 || coll.root >= world))
    return concat("root ", coll.root, " is out of range");
  for (const int64_t count : given.counts)
    if (count < 0) return "a count is negative";
  const auto n = static_cast<std::size_t>(world);
  const auto own = [&](int64_t total) { return parts_of(given.counts, total, n)[static_cast<std::size_t>(rank)]; };
  switch (coll.op) {
    case ZR_ALL_REDUCE: return length_problem("dst", coll.dst.count, coll.src.count);
    case ZR_REDUCE_SCATTER: return length_problem("dst", coll.dst.count, own(coll.src.count));
    case ZR_ALL_GATHER: {
      const int64_t total = given.counts.empty() ? coll.src.count * world : sum_of(given.counts);
      const std::string problem = length_problem("dst", coll.dst.count, total);
      return problem.empty() ? length_problem("src", coll.src.count, own(total)) : problem;
    }
    default: return "";
  }
}

}  // namespace

std::string problem_of(const std::vector<RankCollective>& ranks) {
  const RankCollective& first = ranks[0];
  const int world = static_cast<int>(ranks.size());
  for (int r = 0; r < world; ++r) {
    const RankCollective& rank = ranks[static_cast<std::size_t>(r)];
    const zr_coll &a = first.coll, &b = rank.coll;
    if (a.op != b.op) return concat("rank 0 calls ", name_of_op(a.op), ", rank ", r, " calls ", name_of_op(b.op));
    if (std::string problem = problem_of(rank, r, world); !problem.empty())
      return concat(name_of_op(a.op), " on rank ", r, ": ", problem);
    if (a.root != b.root || a.flags != b.flags || (is_reduction(a.op) && a.reduce != b.reduce) ||
        (first.counts != rank.counts && a.op != ZR_ALL_TO_ALL))
      return concat(name_of_op(a.op), ": ranks 0 and ", r, " pass different root, flags, reduce or counts");
    if (is_reduction(a.op) && (a.src.count != b.src.count || a.src.dtype != b.src.dtype))
      return concat(name_of_op(a.op), ": ranks 0 and ", r, " pass ", a.src.count, " and ", b.src.count, " elements");
    if (a.op == ZR_BROADCAST && a.dst.count != b.dst.count)
      return concat("broadcast: ranks 0 and ", r, " pass ", a.dst.count, " and ", b.dst.count, " elements");
  }
  return "";
}

void perform(const std::vector<RankCollective>& ranks) {
  if (ranks[0].coll.op == ZR_BARRIER) return;
  Sources sources;
  sources.bytes.resize(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const zr_coll& coll = ranks[r].coll;
    if (!reads_src(coll, static_cast<int>(r))) continue;
    sources.dtype = coll.src.dtype;
    if (coll.src.count > 0)
      sources.bytes[r].assign(static_cast<const char*>(coll.src.data),
                              static_cast<std::size_t>(coll.src.count * size_of(coll.src.dtype)));
  }
  is_reduction(ranks[0].coll.op) ? reduce_all_elements(ranks, sources) : move_elements(ranks, sources);
}

}  // namespace zr::conform
