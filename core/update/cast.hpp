// Casts between fp32 and narrower dtypes: upcasts are exact, downcasts round to nearest even (docs/numerics.md, section
// 10).
#pragma once

#include <cstdint>

#include "zr/abi/base.h"

namespace zr::host::update {

/// out[count] = `count` elements of `dtype` (fp32, bf16, fp16) as fp32. In all functions, pointers may be null if the
/// count is 0.
void upcast(const void* values, zr_dtype dtype, int64_t count, float* out);
/// out[count] of `dtype` = rounded values; NaN stays NaN.
void downcast(const float* values, int64_t count, zr_dtype dtype, void* out);
/// Finds weights that the program wrote: where values[i] differs from the rounded master[i], master[i] = values[i].
/// Returns true if there were any.
bool sync_master_from_weights(const void* values, zr_dtype dtype, int64_t count, float* master);

}  // namespace zr::host::update
