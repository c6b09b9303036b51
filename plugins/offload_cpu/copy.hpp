// Copies with non-temporal stores, which bypass the cache: offloaded data is not used soon, and its cache lines need
// not be read before they are written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace cpu {

constexpr std::size_t kLine = 64;

/// Like memcpy. Ends with a store fence, so that a thread that synchronises with this one sees the bytes.
inline void stream(char* to, const char* from, std::size_t bytes) {
#ifdef __SSE2__
  const std::size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  std::size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    __m128i part[4];
    for (int k = 0; k < 4; ++k) part[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i) + k);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i) + k, part[k]);
  }
  std::memcpy(to + i, from + i, bytes - i);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace cpu
