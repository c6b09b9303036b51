#include "kernel.hpp"

#include "zr/rounding.hpp"

namespace ZR_ISA {

namespace {
constexpr int kLanes = 16;  // of a sum: element i is in lane i % 16

// Adds fn(i) over [0, n) in double: to lane i % 16, then the lanes in ascending order.
template <class F>
ZR_ALWAYS_INLINE double sum_of(int64_t n, const F& fn) {
  double lanes[kLanes] = {};
  int64_t line = 0;
  for (; line + kLanes <= n; line += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += fn(line + lane);
  for (int lane = 0; line + lane < n; ++lane) lanes[lane] += fn(line + lane);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

ZR_ALWAYS_INLINE double squared(float x) {
  const double wide = x;
  return wide * wide;
}

// Squares of Rows rows of a gradient: adds them to the sums of their columns, rows in ascending order, and writes the
// sum of each row, as sum_of() computes it.
template <int Rows>
ZR_ALWAYS_INLINE void add_squares(const float* __restrict grad, float mul, int64_t columns,
                                  double* __restrict by_column, double* by_row) {
  double lanes[Rows][kLanes] = {};
  const auto add = [&](int64_t line, int lane) __attribute__((always_inline)) {
    double column = by_column[line + lane];
    for (int r = 0; r < Rows; ++r) {
      const double square = squared(grad[r * columns + line + lane] * mul);
      column += square;
      lanes[r][lane] += square;
    }
    by_column[line + lane] = column;
  };
  int64_t line = 0;
  for (; line + kLanes <= columns; line += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) add(line, lane);
  for (int lane = 0; line + lane < columns; ++lane) add(line, lane);
  for (int r = 0; r < Rows; ++r) {
    by_row[r] = 0;
    for (const double lane : lanes[r]) by_row[r] += lane;
  }
}

ZR_ALWAYS_INLINE float direction(const AdafactorConstants& c, float g, float estimate) {
  return g / __builtin_sqrtf(estimate > c.least ? estimate : c.least);
}

// The formula of at::lerp: a gain of 1 gives exactly `value`.
ZR_ALWAYS_INLINE void mean_towards(float& state, float value, float gain) {
  state = gain < 0.5F ? state + gain * (value - state) : value - (value - state) * (1 - gain);
}
}  // namespace

void matrix_means(const AdafactorConstants& constants, const AdafactorRun& run, const AdafactorMatrix& matrix,
                  double* sums) {
  const AdafactorConstants c = constants;
  const int64_t columns = matrix.columns, rows = run.count / columns;
  for (int64_t block = 0; block < rows; block += matrix.block_rows, sums += columns + 2) {
    const int64_t end = block + matrix.block_rows < rows ? block + matrix.block_rows : rows;
    for (int64_t pair = block; pair < end; pair += 2) {
      double squares[2];
      const float* grad = run.grad + pair * columns;
      if (pair + 1 < end)
        add_squares<2>(grad, c.mul, columns, sums, squares);
      else
        add_squares<1>(grad, c.mul, columns, sums, squares);
      for (int64_t r = pair; r < end && r < pair + 2; ++r) {
        const float* weight = run.weight + r * columns;
        mean_towards(matrix.rows[r], static_cast<float>(squares[r - pair] / static_cast<double>(columns)), c.gain);
        sums[columns] += sum_of(columns, [&](int64_t i) { return squared(weight[i]); });
        sums[columns + 1] += matrix.rows[r];
      }
    }
  }
}

void matrix_direction(const AdafactorConstants& constants, const AdafactorRun& run, const AdafactorMatrix& matrix,
                      const double* totals, double all_rows, double* sums) {
  const AdafactorConstants c = constants;
  const int64_t columns = matrix.columns, rows = run.count / columns;
  float* cols = matrix.cols;
  for (int64_t block = 0; block < rows; block += matrix.block_rows, ++sums, cols += columns) {
    for (int64_t i = 0; i < columns; ++i) mean_towards(cols[i], static_cast<float>(totals[i] / all_rows), c.gain);
    for (int64_t r = block; r < rows && r < block + matrix.block_rows; ++r) {
      const float* grad = run.grad + r * columns;
      const float row = matrix.rows[r] * c.row_scale;
      *sums += sum_of(columns, [&](int64_t i) { return squared(direction(c, grad[i] * c.mul, row * cols[i])); });
    }
  }
}

void matrix_update(const AdafactorConstants& constants, const AdafactorRun& run, const AdafactorMatrix& matrix) {
  const AdafactorConstants c = constants;
  const int64_t columns = matrix.columns, rows = run.count / columns;
  for (int64_t r = 0; r < rows; ++r) {
    const float row = matrix.rows[r] * c.row_scale;
    const float* __restrict all_cols = matrix.cols + r / matrix.block_rows * columns;
    uint16_t* const row_out = run.out ? run.out + r * columns : nullptr;
    zr::rounded(run.out_dtype, row_out, columns, run.streams,
                [&](auto rounding, int64_t first, int64_t n, uint16_t* out) {
                  float* __restrict weight = run.weight + r * columns + first;
                  const float* __restrict grad = run.grad + r * columns + first;
                  const float* __restrict cols = all_cols + first;
                  uint16_t* __restrict to = out;
                  for (int64_t i = 0; i < n; ++i) {
                    const float w = weight[i] * c.decay - c.rate * direction(c, grad[i] * c.mul, row * cols[i]);
                    weight[i] = w;
                    rounding.store(to, i, w);
                  }
                });
  }
}

void vector_direction(const AdafactorConstants& constants, const AdafactorRun& run, float* variance, int64_t block,
                      double* sums) {
  const AdafactorConstants c = constants;
  for (int64_t first = 0; first < run.count; first += block, sums += 2) {
    const int64_t n = first + block < run.count ? block : run.count - first;
    const float* weight = run.weight + first;
    const float* __restrict grad = run.grad + first;
    float* __restrict state = variance + first;
    for (int64_t i = 0; i < n; ++i) {
      const float g = grad[i] * c.mul;
      mean_towards(state[i], g * g, c.gain);
    }
    sums[0] = sum_of(n, [&](int64_t i) { return squared(weight[i]); });
    sums[1] = sum_of(n, [&](int64_t i) { return squared(direction(c, grad[i] * c.mul, state[i])); });
  }
}

void vector_update(const AdafactorConstants& constants, const AdafactorRun& run, const float* variance) {
  const AdafactorConstants c = constants;
  zr::rounded(run.out_dtype, run.out, run.count, run.streams,
              [&](auto rounding, int64_t first, int64_t n, uint16_t* out) {
                float* __restrict weight = run.weight + first;
                const float* __restrict grad = run.grad + first;
                const float* __restrict state = variance + first;
                uint16_t* __restrict to = out;
                for (int64_t i = 0; i < n; ++i) {
                  const float w = weight[i] * c.decay - c.rate * direction(c, grad[i] * c.mul, state[i]);
                  weight[i] = w;
                  rounding.store(to, i, w);
                }
              });
}

}  // namespace ZR_ISA
