// For kernels: copies, and reductions whose bits do not depend on timing, over memory that this process can read.
// Sources are added in rank order: (+0 or the content of dst) + src_0 + src_1 + ..., in fp32 for floats of up to 32
// bits, rounded to dst once; fp64 in fp64; integers wrap. MIN and MAX propagate NaN. Always inlined, so that kernels
// compiled for several instruction sets never share a copy.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#include "zr/abi/communicator.h"
#include "zr/float_cast.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The kind of a reduction. dst is equal to src, or ZR_F32 if src is ZR_BF16 or ZR_F16.
struct ReduceKind {
  uint32_t reduce;    // ZR_SUM, ZR_MIN, ZR_MAX
  bool accumulate;    // begins with the content of outs[0]
  zr_dtype src, dst;  // of the sources and of the result
};

/// fp32, added in fp32. Each of these structs says how an element is read into the type in which it is added (upcast),
/// and written back, rounded once (downcast).
struct F32Element {
  using Stored = float;                                                 // in memory
  using Accumulated = float;                                            // while elements are added
  ZR_ALWAYS_INLINE static Accumulated upcast(Stored w) { return w; }    // exact
  ZR_ALWAYS_INLINE static Stored downcast(Accumulated s) { return s; }  // rounded once
};
/// fp64, added in fp64.
struct F64Element {
  using Stored = double;                                                // in memory
  using Accumulated = double;                                           // while elements are added
  ZR_ALWAYS_INLINE static Accumulated upcast(Stored w) { return w; }    // exact
  ZR_ALWAYS_INLINE static Stored downcast(Accumulated s) { return s; }  // rounded once
};
/// bf16, added in fp32.
struct Bf16Element {
  using Stored = uint16_t;                                                       // in memory
  using Accumulated = float;                                                     // while elements are added
  ZR_ALWAYS_INLINE static Accumulated upcast(Stored w) { return from_bf16(w); }  // exact
  ZR_ALWAYS_INLINE static Stored downcast(Accumulated s) { return to_bf16(s); }  // rounded once
};
/// fp16, added in fp32.
struct F16Element {
  using Stored = uint16_t;                                                      // in memory
  using Accumulated = float;                                                    // while elements are added
  ZR_ALWAYS_INLINE static Accumulated upcast(Stored w) { return from_f16(w); }  // exact
  ZR_ALWAYS_INLINE static Stored downcast(Accumulated s) { return to_f16(s); }  // rounded once
};
/// An integer, added in its own type.
template <class T>
struct IntElement {
  using Stored = T;                                                     // in memory
  using Accumulated = T;                                                // while elements are added
  ZR_ALWAYS_INLINE static Accumulated upcast(Stored w) { return w; }    // exact
  ZR_ALWAYS_INLINE static Stored downcast(Accumulated s) { return s; }  // rounded once
};

/// Addition without undefined behaviour on overflow: integers wrap.
ZR_ALWAYS_INLINE float wrapping_add(float a, float b) { return a + b; }
ZR_ALWAYS_INLINE double wrapping_add(double a, double b) { return a + b; }  // in fp64
/// Addition of int8_t, modulo 2^8.
ZR_ALWAYS_INLINE int8_t wrapping_add(int8_t a, int8_t b) {
  return static_cast<int8_t>(static_cast<uint8_t>(a) + static_cast<uint8_t>(b));
}
ZR_ALWAYS_INLINE uint8_t wrapping_add(uint8_t a, uint8_t b) { return static_cast<uint8_t>(a + b); }  // modulo 2^8
/// Addition of int32_t, modulo 2^32.
ZR_ALWAYS_INLINE int32_t wrapping_add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
/// Addition of int64_t, modulo 2^64.
ZR_ALWAYS_INLINE int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

/// ZR_SUM. It begins with +0, so that -0 becomes +0. NaN propagates.
struct SumOp {
  /// Begins a reduction with an element.
  template <class T>
  ZR_ALWAYS_INLINE static T first(T a) {
    return wrapping_add(T(0), a);
  }
  /// Reduces `a` with the next element `b`.
  template <class T>
  ZR_ALWAYS_INLINE static T apply(T a, T b) {
    return wrapping_add(a, b);
  }
};
/// ZR_MIN. NaN propagates.
struct MinOp {
  /// Begins a reduction with an element.
  template <class T>
  ZR_ALWAYS_INLINE static T first(T a) {
    return a;
  }
  /// Reduces `a` with the next element `b`.
  template <class T>
  ZR_ALWAYS_INLINE static T apply(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
/// ZR_MAX. NaN propagates.
struct MaxOp {
  /// Begins a reduction with an element.
  template <class T>
  ZR_ALWAYS_INLINE static T first(T a) {
    return a;
  }
  /// Reduces `a` with the next element `b`.
  template <class T>
  ZR_ALWAYS_INLINE static T apply(T a, T b) {
    return b > a || b != b ? b : a;
  }
};

#ifndef __CUDACC__  // kernels for CUDA have loops of their own
#if defined(__SSE2__)
/// Copies one cache line to `to`, which is aligned to a cache line, with non-temporal stores.
ZR_ALWAYS_INLINE void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32),
                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32)));
#else
  for (int i = 0; i < 64; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
}
#endif

/// Copies, with non-temporal stores if `streams` is set and dst is aligned to a cache line. Call stores_done() after a
/// series of these calls.
ZR_ALWAYS_INLINE void put(void* dst, const void* src, int64_t bytes, bool streams) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  int64_t at = 0;
#if defined(__SSE2__)
  if (streams && reinterpret_cast<uintptr_t>(dst) % 64 == 0)
    for (; at + 64 <= bytes; at += 64) stream_line(to + at, from + at);
#endif
  (void)streams;
  for (; at + 64 <= bytes; at += 64) std::memcpy(to + at, from + at, 64);
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
}
/// Makes the non-temporal stores of put() visible to other threads before any later store.
ZR_ALWAYS_INLINE void stores_done(bool streams) {
#if defined(__SSE2__)
  if (streams) _mm_sfence();
#endif
  (void)streams;
}

/// Copies; dst and src must not overlap. `streams`: with non-temporal stores.
ZR_ALWAYS_INLINE void copy_bytes(void* dst, const void* src, int64_t bytes, bool streams) {
  if (!streams) {
    std::memcpy(dst, src, static_cast<size_t>(bytes));
    return;
  }
  int64_t head = static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(dst) % 64) % 64);
  if (head > bytes) head = bytes;
  std::memcpy(dst, src, static_cast<size_t>(head));
  put(static_cast<char*>(dst) + head, static_cast<const char*>(src) + head, bytes - head, true);
  stores_done(true);
}

/// Elements that are reduced at a time: they stay in the first-level cache.
inline constexpr int64_t kReduceBlock = 256;

/// `words` if m is a full block, else a copy in `buffer`, so that a full block can be read. The elements after the
/// first m have arbitrary values.
template <class Stored>
ZR_ALWAYS_INLINE const Stored* padded_block(const Stored* words, int64_t m, Stored* buffer) {
  if (m == kReduceBlock) return words;
  std::memcpy(buffer, words, static_cast<size_t>(m) * sizeof(Stored));
  return buffer;
}

/// The reduction of one block of elements over the sources. The loops have constant length: the last block is padded,
/// and the padding is never stored.
template <class In, class Reduce>
struct BlockReduction {
  using Source = typename In::Stored;                      // an element of a source
  alignas(64) typename In::Accumulated sum[kReduceBlock];  // of the sources so far

  /// Begins with `held`, the content of dst, and the first source.
  template <class Out>
  ZR_ALWAYS_INLINE void begin_with(const typename Out::Stored* held, const Source* x) {
    for (int64_t i = 0; i < kReduceBlock; ++i) sum[i] = Reduce::apply(Out::upcast(held[i]), In::upcast(x[i]));
  }
  /// Begins with the only source.
  ZR_ALWAYS_INLINE void begin(const Source* x) {
    for (int64_t i = 0; i < kReduceBlock; ++i) sum[i] = Reduce::first(In::upcast(x[i]));
  }
  /// Begins with the first two sources.
  ZR_ALWAYS_INLINE void begin(const Source* x, const Source* y) {
    for (int64_t i = 0; i < kReduceBlock; ++i)
      sum[i] = Reduce::apply(Reduce::first(In::upcast(x[i])), In::upcast(y[i]));
  }
  /// Adds the next source.
  ZR_ALWAYS_INLINE void add(const Source* y) {
    for (int64_t i = 0; i < kReduceBlock; ++i) sum[i] = Reduce::apply(sum[i], In::upcast(y[i]));
  }
  /// The result as it is stored: `sum`, or `buffer` with the rounded elements if dst has another dtype than `sum`.
  template <class Out>
  ZR_ALWAYS_INLINE const void* rounded(typename Out::Stored* buffer) const {
    if constexpr (std::is_same_v<typename In::Accumulated, typename Out::Stored>) {
      (void)buffer;
      return sum;
    } else {
      for (int64_t i = 0; i < kReduceBlock; ++i) buffer[i] = Out::downcast(sum[i]);
      return buffer;
    }
  }
};

/// ordered_reduce() of elements In to elements Out. `accumulate`: see ReduceKind.
template <class In, class Out, class Reduce>
ZR_ALWAYS_INLINE void reduce_range(bool accumulate, const void* const* sources, int32_t n, void* const* outs,
                                   int32_t n_outs, int64_t first, int64_t count, bool streams) {
  using Source = typename In::Stored;
  using Stored = typename Out::Stored;
  BlockReduction<In, Reduce> block;
  alignas(64) Stored rounded[kReduceBlock] = {};
  alignas(64) Source padded[2][kReduceBlock] = {};
  for (int64_t at = first; at < first + count; at += kReduceBlock) {
    const int64_t m = first + count - at < kReduceBlock ? first + count - at : kReduceBlock;
    const auto source = [&](int32_t r, int which) __attribute__((always_inline)) {
      return padded_block(static_cast<const Source*>(sources[r]) + at, m, padded[which]);
    };
    const Source* x = source(0, 0);
    int32_t next = 1;
    if (accumulate)
      block.template begin_with<Out>(padded_block(static_cast<const Stored*>(outs[0]) + at, m, rounded), x);
    else if (n == 1)
      block.begin(x);
    else
      block.begin(x, source(next++, 1));
    for (; next < n; ++next) block.add(source(next, 1));
    const void* result = block.template rounded<Out>(rounded);
    for (int32_t o = 0; o < n_outs; ++o)
      put(static_cast<Stored*>(outs[o]) + at, result, m * static_cast<int64_t>(sizeof(Stored)), streams);
  }
  stores_done(streams);
}

/// Chooses reduce_range for a reduction known at run time.
template <class In, class Out>
ZR_ALWAYS_INLINE void reduce_as(const ReduceKind& kind, const void* const* sources, int32_t n, void* const* outs,
                                int32_t n_outs, int64_t first, int64_t count, bool streams) {
  if (kind.reduce == ZR_SUM)
    reduce_range<In, Out, SumOp>(kind.accumulate, sources, n, outs, n_outs, first, count, streams);
  if (kind.reduce == ZR_MIN)
    reduce_range<In, Out, MinOp>(kind.accumulate, sources, n, outs, n_outs, first, count, streams);
  if (kind.reduce == ZR_MAX)
    reduce_range<In, Out, MaxOp>(kind.accumulate, sources, n, outs, n_outs, first, count, streams);
}

/// Reduces elements [first, first + count) of n >= 1 sources, in their order, and writes the same result to each of the
/// outs. A source may also be an out.
ZR_ALWAYS_INLINE void ordered_reduce(const ReduceKind& kind, const void* const* sources, int32_t n, void* const* outs,
                                     int32_t n_outs, int64_t first, int64_t count, bool streams) {
  switch (kind.src) {
    case ZR_F32: return reduce_as<F32Element, F32Element>(kind, sources, n, outs, n_outs, first, count, streams);
    case ZR_F64: return reduce_as<F64Element, F64Element>(kind, sources, n, outs, n_outs, first, count, streams);
    case ZR_BF16:
      if (kind.dst == ZR_F32)
        return reduce_as<Bf16Element, F32Element>(kind, sources, n, outs, n_outs, first, count, streams);
      return reduce_as<Bf16Element, Bf16Element>(kind, sources, n, outs, n_outs, first, count, streams);
    case ZR_F16:
      if (kind.dst == ZR_F32)
        return reduce_as<F16Element, F32Element>(kind, sources, n, outs, n_outs, first, count, streams);
      return reduce_as<F16Element, F16Element>(kind, sources, n, outs, n_outs, first, count, streams);
    case ZR_I8:
      return reduce_as<IntElement<int8_t>, IntElement<int8_t>>(kind, sources, n, outs, n_outs, first, count, streams);
    case ZR_U8:
      return reduce_as<IntElement<uint8_t>, IntElement<uint8_t>>(kind, sources, n, outs, n_outs, first, count, streams);
    case ZR_I32:
      return reduce_as<IntElement<int32_t>, IntElement<int32_t>>(kind, sources, n, outs, n_outs, first, count, streams);
    case ZR_I64:
      return reduce_as<IntElement<int64_t>, IntElement<int64_t>>(kind, sources, n, outs, n_outs, first, count, streams);
    default: return;
  }
}

#endif  // __CUDACC__

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
