// The arithmetic of Adafactor for one slice. docs/optimizers.md has the order of operations.
#pragma once

#include <cstdint>

#include "zr/abi/base.h"
#include "zr/isa.hpp"

struct AdafactorConstants {  // computed in double, rounded once
  float mul;                 // factor of the reduced gradient
  float gain;                // weight of the new value in the running means
  float least;               // lower bound of the estimate of the squared gradient
  float row_scale;           // matrices: 1 / mean of the row state
  float decay;               // 1 - lr weight_decay
  float rate;                // of the update
};

struct AdafactorRun {
  float* weight;  // the fp32 master weight
  const float* grad;
  int64_t count;
  uint16_t* out;  // the rounded weight, or null
  zr_dtype out_dtype;
  bool streams;  // write `out` with non-temporal stores
};

// A slice of a matrix: complete rows of `columns` elements. `block_rows` rows share a copy of the column state.
struct AdafactorMatrix {
  float* rows;  // by row
  float* cols;  // by block and column
  int64_t columns, block_rows;
};

// Pass 0 over a matrix. Per block: sums of the squared gradient by column, of the squared weights, and of the new row
// state.
ZR_KERNEL(void matrix_means(const AdafactorConstants& c, const AdafactorRun& run, const AdafactorMatrix& matrix,
                            double* sums))
// Pass 1: moves the column state of every block towards the means of the columns, totals[i] / rows, and adds up the
// squared direction per block.
ZR_KERNEL(void matrix_direction(const AdafactorConstants& c, const AdafactorRun& run, const AdafactorMatrix& matrix,
                                const double* totals, double rows, double* sums))
// Changes the weights.
ZR_KERNEL(void matrix_update(const AdafactorConstants& c, const AdafactorRun& run, const AdafactorMatrix& matrix))

// Pass 0 over a parameter that is not a matrix. Per block of `block` elements: sums of the squared weights, and of the
// squared direction.
ZR_KERNEL(void vector_direction(const AdafactorConstants& c, const AdafactorRun& run, float* variance, int64_t block,
                                double* sums))
// Changes the weights.
ZR_KERNEL(void vector_update(const AdafactorConstants& c, const AdafactorRun& run, const float* variance))
