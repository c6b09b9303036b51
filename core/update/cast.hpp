// Between fp32 and the narrower types: widening is exact, narrowing rounds to nearest even (NUMERICS.md 10).
#pragma once

#include <cstdint>

#include "zr/abi/base.h"

namespace zr::host {

/// out[count] = fp32 of `count` elements of `dtype` (fp32, bf16, fp16).
void upcast(const void* values, zr_dtype dtype, int64_t count, float* out);
/// out[count] of `dtype` = values rounded; NaN stays NaN.
void downcast(const float* values, int64_t count, zr_dtype dtype, void* out);
/// Where values[i] is not what master[i] rounds to, someone wrote the former: master[i] becomes it.
bool sync_master_from_weights(const void* values, zr_dtype dtype, int64_t count, float* master);

}  // namespace zr::host
