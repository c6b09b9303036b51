// The map between numbers and 8-bit codes (docs/optimizers.md), for kernels: scalar, also on devices, and with AVX2 for
// 8 elements (decoding) or 32 (encoding); all give the same bits. Decade i holds ratios from 10^(i-7) to 10^(i-6) in N
// 2^i equal cells, whose codes begin at N 2^i - Offset; code 0 is 0, and the code after the last cell is 1. N = 1,
// Offset = 0: absolute values of exp_avg. N = 2, Offset = 1: exp_avg_sq.
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
  float slope[8], start[8], scale[8], base[8];
};
template <int N, int Offset>
constexpr Tables<N, Offset> make_tables() {
  Tables<N, Offset> t{};
  for (int i = 0; i < kDecades; ++i) {
    const auto cells = static_cast<float>(N * (1 << i));
    t.slope[i] = cells / 0.9F / kBounds[i];
    t.start[i] = cells - Offset - cells / 9;
    t.scale[i] = 0.9F * kBounds[i] / cells;
    t.base[i] = kBounds[i] * (0.45F / cells - 0.8F);
  }
  t.base[kDecades] = 1;
  return t;
}
using SignedTables = Tables<1, 0>;
using UnsignedTables = Tables<2, 1>;
constexpr SignedTables kSigned = make_tables<1, 0>();
constexpr UnsignedTables kUnsigned = make_tables<2, 1>();

/// The code of a ratio in [0, 1].
template <int N, int Offset>
ZR_ALWAYS_INLINE int code_of(const Tables<N, Offset>& tables, float ratio) {
  // The decade, by the numbers in kBounds, an array that device code cannot read.
  const int i =
      (ratio > 1e-6F) + (ratio > 1e-5F) + (ratio > 1e-4F) + (ratio > 1e-3F) + (ratio > 1e-2F) + (ratio > 1e-1F);
  return static_cast<int>(ratio * tables.slope[i] + tables.start[i]);
}
/// The ratio of a code.
template <int N, int Offset>
ZR_ALWAYS_INLINE float ratio_of(const Tables<N, Offset>& tables, int code) {
  if (code == 0) return 0;
  const auto position = static_cast<float>(code + Offset);
#ifdef __CUDA_ARCH__
  const int i = static_cast<int>(zr::bits_of(position) >> 23) - (127 + (N - 1));  // log2(position / N), N = 1 or 2
#else
  int i = 0;
  while (code + Offset >= 2 * N * (1 << i)) ++i;
#endif
  return position * tables.scale[i] + tables.base[i];
}

/// exp_avg: the sign in the highest bit; 128 is 1, so 0 has no sign.
ZR_ALWAYS_INLINE uint8_t signed_code(const SignedTables& tables, float ratio) {
  const float size = ratio < 0 ? -ratio : ratio;
  const int code = code_of(tables, size < 1 ? size : 1.0F);
  return static_cast<uint8_t>(ratio < 0 && code > 0 ? (code < 127 ? code : 127) | 128 : code);
}
ZR_ALWAYS_INLINE float signed_ratio(const SignedTables& tables, uint8_t code) {
  const float size = ratio_of(tables, code == 128 ? 128 : code & 127);
  return code > 128 ? -size : size;
}
/// exp_avg_sq. Only 0 has code 0: as a denominator, 0 instead of a small number would make a huge update.
ZR_ALWAYS_INLINE uint8_t unsigned_code(const UnsignedTables& tables, float ratio) {
  const int code = code_of(tables, ratio < 1 ? ratio : 1.0F);
  return static_cast<uint8_t>(ratio > 0 && code == 0 ? 1 : code);
}
ZR_ALWAYS_INLINE float unsigned_ratio(const UnsignedTables& tables, uint8_t code) { return ratio_of(tables, code); }

/// Without the sign, the bits of floats have the order of the numbers, NaNs above infinity. Compilers vectorize only
/// the comparison of the bits.
ZR_ALWAYS_INLINE int32_t bits_of_size(float value) { return static_cast<int32_t>(zr::bits_of(value) & 0x7fffffffU); }

constexpr float kSmallest = 1e-30F;   // blocks of smaller numbers are 0: the inverse of their scale could be infinite
constexpr float kLargest = 0x1p125F;  // of the scales of exp_avg_sq: the inverse of a larger one is denormal

/// The scale of a block of exp_avg_sq with this largest value. The square of a gradient may be infinite; with an
/// infinite scale, all elements of the block would be NaN.
ZR_ALWAYS_INLINE float scale_of_squares(float largest) { return largest > kLargest ? kLargest : largest; }
ZR_ALWAYS_INLINE float inverse_of(float scale) { return scale < kSmallest ? 0.0F : 1 / scale; }

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
ZR_ALWAYS_INLINE __m256i codes_of(const Tables<N, Offset>& tables, __m256 ratio) {
  const __m256i i = decades_of(ratio);
  const __m256 slope = _mm256_permutevar8x32_ps(_mm256_loadu_ps(tables.slope), i),
               start = _mm256_permutevar8x32_ps(_mm256_loadu_ps(tables.start), i);
  return _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(ratio, slope), start));
}
template <int N, int Offset>
ZR_ALWAYS_INLINE __m256 ratios_of(const Tables<N, Offset>& tables, __m256i code) {
  const __m256 position = _mm256_cvtepi32_ps(_mm256_add_epi32(code, _mm256_set1_epi32(Offset)));
  const __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(position), 23);
  const __m256i i = _mm256_sub_epi32(exponent, _mm256_set1_epi32(127 + (N - 1)));  // log2(position / N), N = 1 or 2
  const __m256 scale = _mm256_permutevar8x32_ps(_mm256_loadu_ps(tables.scale), i),
               base = _mm256_permutevar8x32_ps(_mm256_loadu_ps(tables.base), i);
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
    code[v] = codes_of(kSigned, _mm256_min_ps(_mm256_andnot_ps(sign, ratio[v]), one));
  }
  const __m256i size = pack(code);
  const __m256i negative = _mm256_or_si256(_mm256_min_epu8(size, _mm256_set1_epi8(127)), _mm256_set1_epi8(-128));
  const __m256i is_negative = _mm256_andnot_si256(_mm256_cmpeq_epi8(size, _mm256_setzero_si256()), pack_signs(ratio));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), in_order(_mm256_blendv_epi8(size, negative, is_negative)));
}
/// Stores the codes of kChunk values x inverse, of which none is negative or -0.
ZR_ALWAYS_INLINE void store_unsigned(const float* values, __m256 inverse, uint8_t* to) {
  __m256 ratio[4];
  __m256i code[4];
  for (int v = 0; v < 4; ++v) {
    ratio[v] = _mm256_mul_ps(_mm256_loadu_ps(values + v * kVector), inverse);
    code[v] = codes_of(kUnsigned, _mm256_min_ps(ratio[v], _mm256_set1_ps(1)));
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
  return _mm256_xor_ps(ratios_of(kSigned, size), sign);
}
ZR_ALWAYS_INLINE __m256 unsigned_ratios(__m256i code) { return ratios_of(kUnsigned, code); }
#endif

}  // namespace codes
