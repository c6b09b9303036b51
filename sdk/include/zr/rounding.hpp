// For kernels: the loop of an update, at the speed of memory, which also writes bf16 or fp16 weights in the same pass,
// with non-temporal stores if that is faster.
#pragma once

#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "zr/abi/base.h"
#include "zr/float_cast.hpp"

// Before a loop whose iterations use different memory, although the compiler cannot see it: it then vectorises the loop
// without comparing addresses first.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define ZR_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define ZR_INDEPENDENT_ITERATIONS
#endif

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// How a loop stores each new master weight. KeepFloat stores nothing: fp32 weights are their own master weights.
struct KeepFloat {
  ZR_ALWAYS_INLINE static void store(uint16_t*, int64_t, float) {}  // does nothing
  static constexpr bool downcasts = false;                          // store() does not write to `out`
};
/// Rounds to bf16.
struct RoundBf16 {
  /// Writes `value`, rounded, to out[i].
  ZR_ALWAYS_INLINE static void store(uint16_t* out, int64_t i, float value) { out[i] = to_bf16(value); }
  static constexpr bool downcasts = true;  // store() writes to `out`
};
/// Rounds to fp16.
struct RoundF16 {
  /// Writes `value`, rounded, to out[i].
  ZR_ALWAYS_INLINE static void store(uint16_t* out, int64_t i, float value) { out[i] = to_f16(value); }
  static constexpr bool downcasts = true;  // store() writes to `out`
};

/// True if this processor is one on which the requests of prefetched_loop() have been measured to pay.
ZR_ALWAYS_INLINE bool requests_pay() {
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__)) && !defined(__CUDA_ARCH__)
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

/// Calls update(i) once for each i in [0, n), in any order; the calls must be independent of each other. On an Intel
/// processor, requests the elements of `arrays` 512 elements before they are used: by itself it does so only as far as
/// it can execute ahead, which the divisions and roots of an update limit (AdamW takes 1.15 to 1.25 times as long
/// without the requests). An AMD processor requests far enough ahead by itself (Zen 4: AdamW takes 1.05 to 1.2 times
/// as long with the requests). A request beyond the end of an array has no effect.
template <class Update, class... T>
ZR_ALWAYS_INLINE void prefetched_loop(int64_t n, const Update& update, const T*... arrays) {
  constexpr int64_t kBlock = 64, kElementsAhead = 512, kLine = 64;  // kLine: bytes
  const auto request = [](const auto* array) {
    static_assert(sizeof *array <= kLine);
    for (int64_t i = 0; i < kBlock; i += kLine / static_cast<int64_t>(sizeof *array)) {
#if defined(__GNUC__) && !defined(__CUDA_ARCH__)
      __builtin_prefetch(array + kElementsAhead + i, 0, 2);  // 2: into the second cache
#endif
    }
  };
  int64_t first = 0;
  for (const bool requests = requests_pay(); requests && first + kBlock <= n; first += kBlock) {
    (request(arrays + first), ...);
    ZR_INDEPENDENT_ITERATIONS
    for (int64_t i = first; i < first + kBlock; ++i) update(i);
  }
  ZR_INDEPENDENT_ITERATIONS
  for (int64_t i = first; i < n; ++i) update(i);
}

/// Calls loop(Rounding, first, count, out) for consecutive parts of [0, count). Each call handles `count` elements from
/// `first` on and writes their rounded values to out[0], out[1], ... `streams`: use non-temporal stores, which bypass
/// the cache, where the alignment permits. The results have the same bits either way.
template <class Loop>
ZR_ALWAYS_INLINE void rounded(zr_dtype dtype, uint16_t* out, int64_t count, bool streams, const Loop& loop) {
  if (!out) return loop(KeepFloat{}, 0, count, out);
  constexpr int64_t kLines = 512;  // elements: 16 cache lines
  alignas(64) uint16_t lines[kLines];
#if !defined(__SSE2__)
  streams = false;
#endif
  const int64_t head = static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(out) % 64) % 64 / sizeof *out);
  for (int64_t first = 0; first < count;) {
    const int64_t left = count - first;
    const bool full = streams && first >= head && left >= kLines;
    const int64_t n = full ? kLines : streams && first < head && head < count ? head - first : left;
    uint16_t* const to = full ? lines : out + first;
    if (dtype == ZR_BF16) {
      loop(RoundBf16{}, first, n, to);
    } else {
      loop(RoundF16{}, first, n, to);
    }
#if defined(__SSE2__)
    for (int64_t i = 0; full && i < kLines; i += 8) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + first + i),
                       _mm_load_si128(reinterpret_cast<__m128i*>(lines + i)));
    }
#endif
    first += n;
  }
#if defined(__SSE2__)
  if (streams) _mm_sfence();
#endif
}

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
