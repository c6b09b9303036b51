// Rounding of sizes and offsets to multiples, for plug-ins and for the engine.
#pragma once

#include <type_traits>

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The smallest multiple of `multiple` that is at least `n`; n >= 0, multiple > 0. n + multiple must not overflow.
template <class T>
constexpr T round_up(T n, std::common_type_t<T> multiple) {
  static_assert(std::is_integral_v<T>);
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
