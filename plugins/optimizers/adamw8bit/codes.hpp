// The map between numbers in [0, 1] and codes (README.md). Decade i holds numbers from 10^(i-7) to 10^(i-6). Its codes
// are the midpoints of N 2^i equal cells; the first of them is N 2^i - Offset. Code 0 is the number 0. N = 1 and Offset
// = 0 give 127 codes, for absolute values of exp_avg; N = 2 and Offset = 1 give 254 codes, for exp_avg_sq.
#pragma once

#include "zr/float_cast.hpp"

namespace codes {

constexpr int kDecades = 7;

/// The code of `x` in [0, 1], not rounded down yet. 1 has the code after the last cell.
template <int N, int Offset>
ZR_ALWAYS_INLINE float position(float x) {
  constexpr float kBounds[kDecades] = {1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1.0F};
  constexpr float kCells[kDecades] = {N, N * 2, N * 4, N * 8, N * 16, N * 32, N * 64};
  float slope = kCells[0] / 0.9F / kBounds[0], start = kCells[0] - Offset - kCells[0] / 9;
#pragma GCC unroll 7
  for (int i = 1; i < kDecades; ++i) {
    const bool above = x > kBounds[i - 1];
    slope = above ? kCells[i] / 0.9F / kBounds[i] : slope;
    start = above ? kCells[i] - Offset - kCells[i] / 9 : start;
  }
  return x * slope + start;
}

/// The number of a code; `code` is at least 1, and below the code after the last cell.
inline double number(int code, int n, int offset) {
  double bound = 1e-6;
  int cells = n;
  while (code >= 2 * cells - offset) {
    cells *= 2;
    bound *= 10;
  }
  return bound * (0.1 + 0.9 * (code - (cells - offset) + 0.5) / cells);
}

}  // namespace codes
