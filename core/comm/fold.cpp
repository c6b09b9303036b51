#include "comm/fold.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace zr::host {

namespace {

// How elements of a type are read into, and written from, the type they are added in.
struct Bf16 {
  uint16_t bits;
};

float load(Bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
float load(_Float16 x) { return static_cast<float>(x); }
template <class T>
T load(T x) {
  return x;
}
template <class T, class Sum>
T store(Sum x) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const auto bits = std::bit_cast<uint32_t>(x);
    if (std::isnan(x)) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  } else {
    return static_cast<T>(x);
  }
}

template <class Sum>
Sum join(Sum a, Sum b, uint32_t reduce) {
  if (reduce == ZR_MIN) return std::min(a, b);
  if (reduce == ZR_MAX) return std::max(a, b);
  if constexpr (std::is_integral_v<Sum>) return static_cast<Sum>(static_cast<std::make_unsigned_t<Sum>>(a) + static_cast<std::make_unsigned_t<Sum>>(b));
  else return a + b;
}

template <class Src, class Dst>
void fold_as(const zr_view& view, const std::vector<const void*>& sources, uint32_t reduce, bool accumulate) {
  auto* dst = static_cast<Dst*>(view.data);
  for (int64_t i = 0; i < view.count; ++i) {
    auto sum = load(Dst{});
    std::size_t s = 0;
    if (accumulate) sum = load(dst[i]);
    else if (reduce != ZR_SUM) sum = load(static_cast<const Src*>(sources[s++])[i]);
    for (; s < sources.size(); ++s) sum = join(sum, static_cast<decltype(sum)>(load(static_cast<const Src*>(sources[s])[i])), reduce);
    dst[i] = store<Dst>(sum);
  }
}

}  // namespace

bool fold(const zr_view& dst, const std::vector<const void*>& sources, zr_dtype src, uint32_t reduce, bool accumulate) {
  const auto is = [&](zr_dtype from, zr_dtype to) { return src == from && dst.dtype == to; };
  if (is(ZR_F32, ZR_F32)) fold_as<float, float>(dst, sources, reduce, accumulate);
  else if (is(ZR_BF16, ZR_F32)) fold_as<Bf16, float>(dst, sources, reduce, accumulate);
  else if (is(ZR_F16, ZR_F32)) fold_as<_Float16, float>(dst, sources, reduce, accumulate);
  else if (is(ZR_BF16, ZR_BF16)) fold_as<Bf16, Bf16>(dst, sources, reduce, accumulate);
  else if (is(ZR_F16, ZR_F16)) fold_as<_Float16, _Float16>(dst, sources, reduce, accumulate);
  else if (is(ZR_F64, ZR_F64)) fold_as<double, double>(dst, sources, reduce, accumulate);
  else if (is(ZR_I8, ZR_I8)) fold_as<int8_t, int8_t>(dst, sources, reduce, accumulate);
  else if (is(ZR_U8, ZR_U8)) fold_as<uint8_t, uint8_t>(dst, sources, reduce, accumulate);
  else if (is(ZR_I32, ZR_I32)) fold_as<int32_t, int32_t>(dst, sources, reduce, accumulate);
  else if (is(ZR_I64, ZR_I64)) fold_as<int64_t, int64_t>(dst, sources, reduce, accumulate);
  else return false;
  return true;
}

}  // namespace zr::host
