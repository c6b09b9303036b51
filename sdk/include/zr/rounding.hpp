// For kernels: an update's loop with the copy-out of narrow weights in the same pass, past the cache where that pays.
#pragma once

#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "zr/abi/base.h"
#include "zr/float_cast.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

inline constexpr int64_t kLine = 16;  // floats
/// For a loop over lines of kLine floats whose weights are fp32: asks for what stands 2 KiB ahead (3 to 4 % of AdamW's
/// time; with narrow weights it costs more than that). Past the end it asks for nothing that hurts.
template <class... Arrays>
ZR_ALWAYS_INLINE void fetch_ahead(int64_t i, Arrays... arrays) {
  (__builtin_prefetch(arrays + i + 512, 1), ...);
}

/// What a loop does with each new master value: `store(out, i, value)`; `downcasts`: it writes.
struct KeepFloat {
  ZR_ALWAYS_INLINE static void store(uint16_t*, int64_t, float) {}
  static constexpr bool downcasts = false;
};
/// Rounds to bf16.
struct RoundBf16 {
  ZR_ALWAYS_INLINE static void store(uint16_t* out, int64_t i, float value) { out[i] = to_bf16(value); }
  static constexpr bool downcasts = true;
};
/// Rounds to fp16.
struct RoundF16 {
  ZR_ALWAYS_INLINE static void store(uint16_t* out, int64_t i, float value) { out[i] = to_f16(value); }
  static constexpr bool downcasts = true;
};

/// Calls loop(Rounding, first, count, out) over [0, count): the elements from `first` on, whose rounded values go to
/// out[0], out[1], ... streams: they reach memory without passing through the cache, where the address allows. The
/// bits are the same.
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
    const bool whole = streams && first >= head && left >= kLines;
    const int64_t n = whole ? kLines : streams && first < head && head < count ? head - first : left;
    uint16_t* const to = whole ? lines : out + first;
    if (dtype == ZR_BF16) {
      loop(RoundBf16{}, first, n, to);
    } else {
      loop(RoundF16{}, first, n, to);
    }
#if defined(__SSE2__)
    for (int64_t i = 0; whole && i < kLines; i += 8) {
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
