#include <cstring>

#include "quantization.hpp"
#include "zr/float_cast.hpp"

namespace ZR_ISA {

namespace {
constexpr int kScaleBytes = 4;

template <int Bits>
constexpr int kValues = Bits == 8 ? mpi::kBlockOf8Bits : mpi::kBlockOf4Bits;

template <int Bits>
struct Codes {  // of one block
  float scale;
  int8_t of[kValues<Bits>];
};

// Values of a block as fp32; the rest becomes 0.
template <int Size>
inline void load(zr_dtype dtype, const char* from, int n, float (&values)[Size]) {
  uint16_t halves[Size] = {};
  if (dtype == ZR_F32) {
    for (int i = n; i < Size; ++i) values[i] = 0;
    std::memcpy(values, from, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  std::memcpy(halves, from, static_cast<size_t>(n) * sizeof(uint16_t));
  if (dtype == ZR_BF16)
    for (int i = 0; i < Size; ++i) values[i] = zr::from_bf16(halves[i]);
  else
    for (int i = 0; i < Size; ++i) values[i] = zr::from_f16(halves[i]);
}

template <int Size>
inline void store(zr_dtype dtype, const float (&values)[Size], int n, char* to) {
  uint16_t halves[Size];
  if (dtype == ZR_F32) {
    std::memcpy(to, values, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  if (dtype == ZR_BF16)
    for (int i = 0; i < Size; ++i) halves[i] = zr::to_bf16(values[i]);
  else
    for (int i = 0; i < Size; ++i) halves[i] = zr::to_f16(values[i]);
  std::memcpy(to, halves, static_cast<size_t>(n) * sizeof(uint16_t));
}

template <int Bits>
inline void encode(const float (&values)[kValues<Bits>], Codes<Bits>& codes) {
  constexpr float kLevels = Bits == 8 ? 127 : 7;
  uint32_t largest = 0;
  for (const float value : values) {
    const uint32_t magnitude = zr::bits_of(value) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool is_finite = largest < 0x7f800000u, is_zero = largest < zr::bits_of(0x1p-100f);
  const float most = zr::float_of(largest), inverse = is_finite && !is_zero ? kLevels / most : 0;
  codes.scale = !is_finite ? zr::float_of(0x7fc00000u) : is_zero ? 0 : most / kLevels;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the sum has no bits after the point, rounded to even
  for (int i = 0; i < kValues<Bits>; ++i) {
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

template <int Bits>
inline char* pack(const Codes<Bits>& codes, int n, char* to) {
  constexpr int kSize = kValues<Bits>;
  std::memcpy(to, &codes.scale, kScaleBytes);
  to += kScaleBytes;
  if constexpr (Bits == 8) {
    std::memcpy(to, codes.of, static_cast<size_t>(n));
    return to + n;
  } else {
    uint8_t bytes[kSize / 2];
    const int half = (n + 1) / 2;
    n == kSize ? pack_halves(codes.of, kSize, bytes) : pack_halves(codes.of, n, bytes);
    std::memcpy(to, bytes, static_cast<size_t>(half));
    return to + half;
  }
}

template <int Bits>
inline const char* unpack(const char* from, int n, Codes<Bits>& codes) {
  constexpr int kSize = kValues<Bits>;
  std::memcpy(&codes.scale, from, kScaleBytes);
  from += kScaleBytes;
  if constexpr (Bits == 8) {
    std::memcpy(codes.of, from, static_cast<size_t>(n));
    return from + n;
  } else {
    uint8_t bytes[kSize / 2];
    const int half = (n + 1) / 2;
    std::memcpy(bytes, from, static_cast<size_t>(half));
    n == kSize ? unpack_halves(bytes, kSize, codes.of) : unpack_halves(bytes, n, codes.of);
    return from + half;
  }
}

// How many values the block has that begins with value `first`.
template <int Bits>
inline int block_at(int64_t first, int64_t count) {
  return count - first < kValues<Bits> ? static_cast<int>(count - first) : kValues<Bits>;
}

template <int Bits>
inline void decode(const Codes<Bits>& codes, float (&values)[kValues<Bits>]) {
  for (int i = 0; i < kValues<Bits>; ++i) values[i] = static_cast<float>(codes.of[i]) * codes.scale;
}

template <int Bits>
inline void quantize_to(zr_dtype dtype, const char* from, int64_t count, char* to) {
  const int64_t width = dtype == ZR_F32 ? 4 : 2;
  for (int64_t first = 0; first < count; first += kValues<Bits>) {
    const int n = block_at<Bits>(first, count);
    float values[kValues<Bits>];
    Codes<Bits> codes;
    load(dtype, from + first * width, n, values);
    encode<Bits>(values, codes);
    to = pack(codes, n, to);
  }
}

// A block is read before the one before it is written, which may end where it begins.
template <int Bits>
inline void dequantize_to(const char* from, zr_dtype dtype, int64_t count, char* to) {
  if (count == 0) return;
  const int64_t width = dtype == ZR_F32 ? 4 : 2;
  Codes<Bits> codes{}, next{};
  from = unpack(from, block_at<Bits>(0, count), next);
  for (int64_t first = 0; first < count; first += kValues<Bits>) {
    codes = next;
    const int64_t after = first + kValues<Bits>;
    if (after < count) from = unpack(from, block_at<Bits>(after, count), next);
    float values[kValues<Bits>];
    decode(codes, values);
    store(dtype, values, block_at<Bits>(first, count), to + first * width);
  }
}

template <int Bits>
inline void add_to(const char* from, int64_t count, float* to) {
  Codes<Bits> codes{};
  for (int64_t first = 0; first < count; first += kValues<Bits>) {
    const int n = block_at<Bits>(first, count);
    from = unpack(from, n, codes);
    float values[kValues<Bits>];
    decode(codes, values);
    for (int i = 0; i < n; ++i) to[first + i] += values[i];
  }
}
}  // namespace

void quantize(int bits, zr_dtype dtype, const void* from, int64_t count, void* to) {
  const auto* in = static_cast<const char*>(from);
  auto* out = static_cast<char*>(to);
  bits == 8 ? quantize_to<8>(dtype, in, count, out) : quantize_to<4>(dtype, in, count, out);
}

void dequantize(int bits, const void* from, zr_dtype dtype, int64_t count, void* to) {
  const auto* in = static_cast<const char*>(from);
  auto* out = static_cast<char*>(to);
  bits == 8 ? dequantize_to<8>(in, dtype, count, out) : dequantize_to<4>(in, dtype, count, out);
}

void add_quantized(int bits, const void* from, int64_t count, float* to) {
  const auto* in = static_cast<const char*>(from);
  bits == 8 ? add_to<8>(in, count, to) : add_to<4>(in, count, to);
}

}  // namespace ZR_ISA
