// Collectives in plain scalar code: computes the result of every rank from the sources of all ranks in one process.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "zr/abi/communicator.h"

namespace zr::testing {

using Bytes = std::vector<char>;
inline constexpr zr_dtype kDtypes[] = {ZR_F32, ZR_BF16, ZR_F16, ZR_F64, ZR_I8, ZR_U8, ZR_I32, ZR_I64};

inline int64_t width_of(zr_dtype d) {
  return d == ZR_F64 || d == ZR_I64 ? 8 : d == ZR_F32 || d == ZR_I32 ? 4 : d == ZR_BF16 || d == ZR_F16 ? 2 : 1;
}
inline bool is_float(zr_dtype d) { return d == ZR_F32 || d == ZR_BF16 || d == ZR_F16 || d == ZR_F64; }

template <class T>
T read_as(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <class T>
void write_as(void* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

inline float upcast(zr_dtype d, const char* at) {
  if (d == ZR_F32) return read_as<float>(at);
  if (d == ZR_F16) return static_cast<float>(read_as<_Float16>(at));
  return std::bit_cast<float>(static_cast<uint32_t>(read_as<uint16_t>(at)) << 16);
}
inline void downcast(zr_dtype d, float value, char* at) {
  if (d == ZR_F32) return write_as(at, value);
  if (d == ZR_F16) return write_as(at, static_cast<_Float16>(value));
  // Round to nearest, ties to even.
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t low = bits >> 16, rest = bits & 0xffff;
  const bool up = rest > 0x8000 || (rest == 0x8000 && (low & 1));
  write_as(at, static_cast<uint16_t>(low + (up ? 1 : 0)));
}
inline int64_t read_integer(zr_dtype d, const char* at) {
  switch (d) {
    case ZR_I8: return read_as<int8_t>(at);
    case ZR_U8: return read_as<uint8_t>(at);
    case ZR_I32: return read_as<int32_t>(at);
    default: return read_as<int64_t>(at);
  }
}
inline void write_integer(zr_dtype d, int64_t value, char* at) {
  if (d == ZR_I32) return write_as(at, static_cast<int32_t>(value));
  if (d == ZR_I64) return write_as(at, value);
  write_as(at, static_cast<int8_t>(value));
}

template <class T>
T join(uint32_t reduce, T a, T b) {
  if (reduce == ZR_MIN) return b < a ? b : a;
  if (reduce == ZR_MAX) return b > a ? b : a;
  if constexpr (std::is_same_v<T, int64_t>)
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  return a + b;
}

/// Reduces one element of every source, in rank order, into the element at `to`.
inline void reduce_element(uint32_t reduce, bool accumulate, zr_dtype src, zr_dtype dst,
                           const std::vector<const char*>& sources, char* to) {
  const auto reduce_all = [&](auto start, auto load) {
    auto sum = start;
    std::size_t s = 0;
    if (!accumulate && reduce != ZR_SUM) sum = load(sources[s++]);
    for (; s < sources.size(); ++s) sum = join(reduce, sum, load(sources[s]));
    return sum;
  };
  if (dst == ZR_F64) {
    const auto load = [](const char* at) { return read_as<double>(at); };
    write_as(to, reduce_all(accumulate ? load(to) : 0.0, load));
  } else if (is_float(dst)) {
    downcast(dst, reduce_all(accumulate ? upcast(dst, to) : 0.0f, [&](const char* at) { return upcast(src, at); }), to);
  } else {
    write_integer(dst,
                  reduce_all(accumulate ? read_integer(dst, to) : int64_t{0},
                             [&](const char* at) { return read_integer(src, at); }),
                  to);
  }
}

/// One collective, described for all ranks.
struct Case {
  uint32_t op = 0, reduce = ZR_SUM, flags = 0;
  zr_dtype src = ZR_F32, dst = ZR_F32;
  int world = 1, root = 0;
  int64_t total = 0;                             // elements, for operations that are not split into parts
  std::vector<int64_t> counts{};                 // by rank; empty: equal parts, and no counts are passed
  int64_t part = 0;                              // elements of each equal part
  std::vector<std::vector<int64_t>> exchange{};  // all_to_all: [from][to]; empty: equal parts
  bool in_place = false;

  int64_t count(int r) const { return counts.empty() ? part : counts[static_cast<std::size_t>(r)]; }
  int64_t start(int r) const {
    int64_t at = 0;
    for (int i = 0; i < r; ++i) at += count(i);
    return at;
  }
  int64_t sum() const { return start(world); }
  int64_t sent(int p, int r) const {
    return exchange.empty() ? part : exchange[static_cast<std::size_t>(p)][static_cast<std::size_t>(r)];
  }
  bool has_src(int r) const { return op == ZR_BROADCAST || op == ZR_SCATTER ? r == root : op != ZR_BARRIER; }
  bool has_dst(int r) const { return op == ZR_REDUCE || op == ZR_GATHER ? r == root : op != ZR_BARRIER; }
  int64_t src_count(int r) const {
    if (!has_src(r)) return 0;
    if (op == ZR_REDUCE_SCATTER || op == ZR_SCATTER) return sum();
    if (op == ZR_ALL_GATHER || op == ZR_GATHER) return count(r);
    if (op != ZR_ALL_TO_ALL) return total;
    int64_t n = 0;
    for (int to = 0; to < world; ++to) n += sent(r, to);
    return n;
  }
  int64_t dst_count(int r) const {
    if (!has_dst(r)) return 0;
    if (op == ZR_REDUCE_SCATTER || op == ZR_SCATTER) return count(r);
    if (op == ZR_ALL_GATHER || op == ZR_GATHER) return sum();
    if (op != ZR_ALL_TO_ALL) return total;
    int64_t n = 0;
    for (int from = 0; from < world; ++from) n += sent(from, r);
    return n;
  }
};

/// The content of rank's dst after the collective; `previous` is its content before.
inline Bytes expected(const Case& c, int rank, const std::vector<Bytes>& sources, Bytes previous) {
  if (!c.has_dst(rank)) return previous;
  const int64_t size = width_of(c.src), to_size = width_of(c.dst);
  const bool reduces = c.op == ZR_ALL_REDUCE || c.op == ZR_REDUCE_SCATTER || c.op == ZR_REDUCE;
  if (reduces) {
    const int64_t first = c.op == ZR_REDUCE_SCATTER ? c.start(rank) : 0;
    std::vector<const char*> elements(sources.size());
    for (int64_t i = 0; i < c.dst_count(rank); ++i) {
      for (std::size_t s = 0; s < sources.size(); ++s) elements[s] = sources[s].data() + (first + i) * size;
      reduce_element(c.reduce, c.flags & ZR_COLL_ACCUMULATE, c.src, c.dst, elements, previous.data() + i * to_size);
    }
    return previous;
  }
  int64_t at = 0;
  for (int p = 0; p < c.world; ++p) {
    if (!c.has_src(p)) continue;
    int64_t first = 0, n = 0;
    switch (c.op) {
      case ZR_BROADCAST: n = c.total; break;
      case ZR_SCATTER: first = c.start(rank), n = c.count(rank); break;
      case ZR_ALL_TO_ALL:
        for (int to = 0; to < rank; ++to) first += c.sent(p, to);
        n = c.sent(p, rank);
        break;
      default: n = c.count(p);
    }
    if (n > 0)
      std::memcpy(previous.data() + at * to_size, sources[static_cast<std::size_t>(p)].data() + first * size,
                  static_cast<std::size_t>(n * size));
    at += n;
  }
  return previous;
}

/// Floating-point numbers, including negative zeros, whose sum depends on the order; integers whose sum wraps.
inline Bytes noise(zr_dtype d, int64_t count, uint64_t seed) {
  static constexpr double kMagnitudes[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1};
  Bytes bytes(static_cast<std::size_t>(count * width_of(d)));
  for (int64_t i = 0; i < count; ++i) {
    uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(i) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebu;
    x ^= x >> 32;
    char* at = bytes.data() + i * width_of(d);
    const double value = x % 61 == 0 ? -0.0 : (static_cast<double>(x % 20011) - 10000) * kMagnitudes[x / 20011 % 6];
    if (d == ZR_F64)
      write_as(at, value);
    else if (is_float(d))
      downcast(d, static_cast<float>(value), at);
    else
      write_integer(d, static_cast<int64_t>(x), at);
  }
  return bytes;
}

}  // namespace zr::testing
