// The map between numbers and 8-bit codes (README.md), for kernels: scalar, and with AVX2 for 8 elements (decoding) or
// 32 (encoding); both give the same bits. Decade i holds ratios from 10^(i-7) to 10^(i-6) in N 2^i equal cells, whose
// codes begin at N 2^i - Offset; code 0 is 0, and the code after the last cell is 1. N = 1, Offset = 0: absolute values
// of exp_avg. N = 2, Offset = 1: exp_avg_sq.
#pragma once

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "zr/float_cast.hpp"

namespace codes {

constexpr int64_t kChunk = 32;  // elements that are encoded at once
constexpr int kDecades = 7;
constexpr float kBounds[kDecades] = {1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1.0F};  // upper bounds of the decades

/// By decade: `ratio x slope + start` is the code, `(code + Offset) x scale + base` is the midpoint of the cell. The
/// last entry is that of the number 1.
template <int N, int Offset>
struct Tables {
  static constexpr float cells(int i) { return static_cast<float>(N * (1 << i)); }
  static constexpr float slope(int i) { return cells(i) / 0.9F / kBounds[i]; }
  static constexpr float start(int i) { return cells(i) - Offset - cells(i) / 9; }
  static constexpr float scale(int i) { return 0.9F * kBounds[i] / cells(i); }
  static constexpr float base(int i) { return kBounds[i] * (0.45F / cells(i) - 0.8F); }
  static constexpr float kSlope[8] = {slope(0), slope(1), slope(2), slope(3), slope(4), slope(5), slope(6), 0};
  static constexpr float kStart[8] = {start(0), start(1), start(2), start(3), start(4), start(5), start(6), 0};
  static constexpr float kScale[8] = {scale(0), scale(1), scale(2), scale(3), scale(4), scale(5), scale(6), 0};
  static constexpr float kBase[8] = {base(0), base(1), base(2), base(3), base(4), base(5), base(6), 1};
};

/// The code of a ratio in [0, 1].
template <int N, int Offset>
ZR_ALWAYS_INLINE int code_of(float ratio) {
  int i = 0;
  for (int bound = 0; bound + 1 < kDecades; ++bound) i += ratio > kBounds[bound];
  return static_cast<int>(ratio * Tables<N, Offset>::kSlope[i] + Tables<N, Offset>::kStart[i]);
}
/// The ratio of a code.
template <int N, int Offset>
ZR_ALWAYS_INLINE float ratio_of(int code) {
  if (code == 0) return 0;
  int i = 0;
  while (code + Offset >= 2 * N * (1 << i)) ++i;
  return static_cast<float>(code + Offset) * Tables<N, Offset>::kScale[i] + Tables<N, Offset>::kBase[i];
}

/// exp_avg: the sign in the highest bit; 128 is 1, so 0 has no sign.
ZR_ALWAYS_INLINE uint8_t signed_code(float ratio) {
  const float size = ratio < 0 ? -ratio : ratio;
  const int code = code_of<1, 0>(size < 1 ? size : 1.0F);
  return static_cast<uint8_t>(ratio < 0 && code > 0 ? (code < 127 ? code : 127) | 128 : code);
}
ZR_ALWAYS_INLINE float signed_ratio(uint8_t code) {
  const float size = ratio_of<1, 0>(code == 128 ? 128 : code & 127);
  return code > 128 ? -size : size;
}
/// exp_avg_sq. Only 0 has code 0: as a denominator, 0 instead of a small number would make a huge update.
ZR_ALWAYS_INLINE uint8_t unsigned_code(float ratio) {
  const int code = code_of<2, 1>(ratio < 1 ? ratio : 1.0F);
  return static_cast<uint8_t>(ratio > 0 && code == 0 ? 1 : code);
}
ZR_ALWAYS_INLINE float unsigned_ratio(uint8_t code) { return ratio_of<2, 1>(code); }

#if defined(__AVX2__)
constexpr int64_t kVector = 8;  // elements

// The decades of ratios from 0 to 1. The bits of a float grow like its logarithm: for normal numbers,
// L(x) = log10(2) x (bits / 2^23 - 127) is at most log10(x) and at least log10(x) - 0.026. So L(x) + 6.03 rounded down
// is the decade or the one below, which the comparison with the upper bound decides. Denormal numbers and 0 give a
// negative number: decade 0.
ZR_ALWAYS_INLINE __m256i decades_of(__m256 ratio) {
  constexpr float kSlope = 0.30103F / 8388608, kStart = 6.03F - 127 * 0.30103F;
  const __m256 logarithm = _mm256_add_ps(
      _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_castps_si256(ratio)), _mm256_set1_ps(kSlope)), _mm256_set1_ps(kStart));
  const __m256i low = _mm256_max_epi32(_mm256_cvttps_epi32(logarithm), _mm256_setzero_si256());
  const __m256 bound = _mm256_permutevar8x32_ps(
      _mm256_setr_ps(kBounds[0], kBounds[1], kBounds[2], kBounds[3], kBounds[4], kBounds[5], kBounds[6], 1), low);
  return _mm256_sub_epi32(low, _mm256_castps_si256(_mm256_cmp_ps(ratio, bound, _CMP_GT_OQ)));
}
template <int N, int Offset>
ZR_ALWAYS_INLINE __m256i codes_of(__m256 ratio) {
  using T = Tables<N, Offset>;
  const __m256i i = decades_of(ratio);
  const __m256 slope = _mm256_permutevar8x32_ps(_mm256_loadu_ps(T::kSlope), i),
               start = _mm256_permutevar8x32_ps(_mm256_loadu_ps(T::kStart), i);
  return _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(ratio, slope), start));
}
template <int N, int Offset>
ZR_ALWAYS_INLINE __m256 ratios_of(__m256i code) {
  using T = Tables<N, Offset>;
  const __m256 position = _mm256_cvtepi32_ps(_mm256_add_epi32(code, _mm256_set1_epi32(Offset)));
  const __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(position), 23);
  const __m256i i = _mm256_sub_epi32(exponent, _mm256_set1_epi32(127 + (N - 1)));  // log2(position / N), N = 1 or 2
  const __m256 scale = _mm256_permutevar8x32_ps(_mm256_loadu_ps(T::kScale), i),
               base = _mm256_permutevar8x32_ps(_mm256_loadu_ps(T::kBase), i);
  const __m256 ratio = _mm256_add_ps(_mm256_mul_ps(position, scale), base);
  const __m256i zero = _mm256_cmpeq_epi32(code, _mm256_setzero_si256());
  return _mm256_andnot_ps(_mm256_castsi256_ps(zero), ratio);
}
ZR_ALWAYS_INLINE __m256i load(const uint8_t* codes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
}
// pack() and pack_signs() work on the two halves of vectors separately; this puts their bytes into the order of the
// elements.
ZR_ALWAYS_INLINE __m256i in_order(__m256i packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// Bytes of integers from 0 to 255.
ZR_ALWAYS_INLINE __m256i pack(const __m256i (&code)[4]) {
  return _mm256_packus_epi16(_mm256_packus_epi32(code[0], code[1]), _mm256_packus_epi32(code[2], code[3]));
}
// Bytes with the signs of the numbers: negative, 0, positive; -0 is negative.
ZR_ALWAYS_INLINE __m256i pack_signs(const __m256 (&ratio)[4]) {
  return _mm256_packs_epi16(_mm256_packs_epi32(_mm256_castps_si256(ratio[0]), _mm256_castps_si256(ratio[1])),
                            _mm256_packs_epi32(_mm256_castps_si256(ratio[2]), _mm256_castps_si256(ratio[3])));
}
/// Stores the codes of kChunk values x inverse.
ZR_ALWAYS_INLINE void store_signed(const float* values, __m256 inverse, uint8_t* to) {
  const __m256 sign = _mm256_set1_ps(-0.0F), one = _mm256_set1_ps(1);
  __m256 ratio[4];
  __m256i code[4];
  for (int v = 0; v < 4; ++v) {
    ratio[v] = _mm256_min_ps(_mm256_mul_ps(_mm256_loadu_ps(values + v * kVector), inverse), one);  // NaN becomes 1
    code[v] = codes_of<1, 0>(_mm256_min_ps(_mm256_andnot_ps(sign, ratio[v]), one));
  }
  const __m256i size = pack(code);
  const __m256i negative = _mm256_or_si256(_mm256_min_epu8(size, _mm256_set1_epi8(127)), _mm256_set1_epi8(-128));
  const __m256i is_negative = _mm256_andnot_si256(_mm256_cmpeq_epi8(size, _mm256_setzero_si256()), pack_signs(ratio));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), in_order(_mm256_blendv_epi8(size, negative, is_negative)));
}
/// The same; no value is negative or -0.
ZR_ALWAYS_INLINE void store_unsigned(const float* values, __m256 inverse, uint8_t* to) {
  __m256 ratio[4];
  __m256i code[4];
  for (int v = 0; v < 4; ++v) {
    ratio[v] = _mm256_mul_ps(_mm256_loadu_ps(values + v * kVector), inverse);
    code[v] = codes_of<2, 1>(_mm256_min_ps(ratio[v], _mm256_set1_ps(1)));
  }
  const __m256i at_least = _mm256_min_epu8(pack_signs(ratio), _mm256_set1_epi8(1));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), in_order(_mm256_max_epu8(pack(code), at_least)));
}
ZR_ALWAYS_INLINE __m256 signed_ratios(__m256i code) {
  const __m256i one = _mm256_cmpeq_epi32(code, _mm256_set1_epi32(128));
  const __m256i size =
      _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi32(127)), _mm256_and_si256(one, _mm256_set1_epi32(128)));
  const __m256i negative = _mm256_cmpgt_epi32(code, _mm256_set1_epi32(128));
  const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(negative), _mm256_set1_ps(-0.0F));
  return _mm256_xor_ps(ratios_of<1, 0>(size), sign);
}
ZR_ALWAYS_INLINE __m256 unsigned_ratios(__m256i code) { return ratios_of<2, 1>(code); }
#endif

}  // namespace codes
