#include <cstring>

#include "quantization.hpp"
#include "zr/float_cast.hpp"

namespace ZR_ISA {

namespace {
constexpr int kValues = 128, kScaleBytes = 4;

struct Codes {  // of one block
  float scale;
  int8_t of[kValues];
};

// Values of a block as fp32; the rest becomes 0.
inline void load(zr_dtype dtype, const char* from, int n, float* values) {
  uint16_t halves[kValues] = {};
  if (dtype == ZR_F32) {
    for (int i = n; i < kValues; ++i) values[i] = 0;
    std::memcpy(values, from, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  std::memcpy(halves, from, static_cast<size_t>(n) * sizeof(uint16_t));
  if (dtype == ZR_BF16)
    for (int i = 0; i < kValues; ++i) values[i] = zr::from_bf16(halves[i]);
  else
    for (int i = 0; i < kValues; ++i) values[i] = zr::from_f16(halves[i]);
}

inline void store(zr_dtype dtype, const float* values, int n, char* to) {
  uint16_t halves[kValues];
  if (dtype == ZR_F32) {
    std::memcpy(to, values, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  if (dtype == ZR_BF16)
    for (int i = 0; i < kValues; ++i) halves[i] = zr::to_bf16(values[i]);
  else
    for (int i = 0; i < kValues; ++i) halves[i] = zr::to_f16(values[i]);
  std::memcpy(to, halves, static_cast<size_t>(n) * sizeof(uint16_t));
}

inline void encode(float levels, const float* values, Codes& codes) {
  uint32_t largest = 0;
  for (int i = 0; i < kValues; ++i) {
    const uint32_t magnitude = zr::bits_of(values[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool is_finite = largest < 0x7f800000u, is_zero = largest < zr::bits_of(0x1p-100f);
  const float most = zr::float_of(largest), inverse = is_finite && !is_zero ? levels / most : 0;
  codes.scale = !is_finite ? zr::float_of(0x7fc00000u) : is_zero ? 0 : most / levels;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum has no bits after the point, rounded to even
  for (int i = 0; i < kValues; ++i) {
    const float rounded = (values[i] * inverse + kRound) - kRound;
    codes.of[i] = static_cast<int8_t>(is_finite ? static_cast<int>(rounded) : 0);
  }
}

// With 4 bits, a byte has a value of the first half of the block, and one of the second. Inlined for full blocks, so
// that the loops have constant length.
ZR_ALWAYS_INLINE void pack_halves(const int8_t* codes, int n, uint8_t* bytes) {
  const int half = (n + 1) / 2;
  for (int i = 0; i < half; ++i) {
    const int second = i + half < n ? codes[i + half] : 0;
    bytes[i] = static_cast<uint8_t>((codes[i] & 15) | (second & 15) << 4);
  }
}

ZR_ALWAYS_INLINE void unpack_halves(const uint8_t* bytes, int n, int8_t* codes) {
  const int half = (n + 1) / 2;
  for (int i = 0; i < half; ++i) codes[i] = static_cast<int8_t>(((bytes[i] & 15) ^ 8) - 8);
  for (int i = 0; i < n - half; ++i) codes[i + half] = static_cast<int8_t>(((bytes[i] >> 4) ^ 8) - 8);
}

inline char* pack(int bits, const Codes& codes, int n, char* to) {
  std::memcpy(to, &codes.scale, kScaleBytes);
  to += kScaleBytes;
  if (bits == 8) {
    std::memcpy(to, codes.of, static_cast<size_t>(n));
    return to + n;
  }
  uint8_t bytes[kValues / 2];
  const int half = (n + 1) / 2;
  n == kValues ? pack_halves(codes.of, kValues, bytes) : pack_halves(codes.of, n, bytes);
  std::memcpy(to, bytes, static_cast<size_t>(half));
  return to + half;
}

inline const char* unpack(int bits, const char* from, int n, Codes& codes) {
  std::memcpy(&codes.scale, from, kScaleBytes);
  from += kScaleBytes;
  if (bits == 8) {
    std::memcpy(codes.of, from, static_cast<size_t>(n));
    return from + n;
  }
  uint8_t bytes[kValues / 2];
  const int half = (n + 1) / 2;
  std::memcpy(bytes, from, static_cast<size_t>(half));
  n == kValues ? unpack_halves(bytes, kValues, codes.of) : unpack_halves(bytes, n, codes.of);
  return from + half;
}

inline int block_of(int64_t count, int64_t first) {
  return count - first < kValues ? static_cast<int>(count - first) : kValues;
}

inline void decode(const Codes& codes, float* values) {
  for (int i = 0; i < kValues; ++i) values[i] = static_cast<float>(codes.of[i]) * codes.scale;
}
}  // namespace

void quantize(int bits, zr_dtype dtype, const void* from, int64_t count, void* to) {
  const int64_t width = dtype == ZR_F32 ? 4 : 2;
  const float levels = bits == 8 ? 127 : 7;
  auto* out = static_cast<char*>(to);
  for (int64_t first = 0; first < count; first += kValues) {
    const int n = block_of(count, first);
    float values[kValues];
    Codes codes;
    load(dtype, static_cast<const char*>(from) + first * width, n, values);
    encode(levels, values, codes);
    out = pack(bits, codes, n, out);
  }
}

// A block is read before the one before it is written, which may end where it begins.
void dequantize(int bits, const void* from, zr_dtype dtype, int64_t count, void* to) {
  if (count == 0) return;
  const int64_t width = dtype == ZR_F32 ? 4 : 2;
  const auto* in = static_cast<const char*>(from);
  Codes codes{}, next{};
  in = unpack(bits, in, block_of(count, 0), next);
  for (int64_t first = 0; first < count; first += kValues) {
    codes = next;
    if (first + kValues < count) in = unpack(bits, in, block_of(count, first + kValues), next);
    float values[kValues];
    decode(codes, values);
    store(dtype, values, block_of(count, first), static_cast<char*>(to) + first * width);
  }
}

void add_quantized(int bits, const void* from, int64_t count, float* to) {
  const auto* in = static_cast<const char*>(from);
  Codes codes{};
  for (int64_t first = 0; first < count; first += kValues) {
    const int n = block_of(count, first);
    in = unpack(bits, in, n, codes);
    float values[kValues];
    decode(codes, values);
    for (int i = 0; i < n; ++i) to[first + i] += values[i];
  }
}

}  // namespace ZR_ISA
