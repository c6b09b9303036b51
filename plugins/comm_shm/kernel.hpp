// The two kernels that work on peers' memory: reduce it in rank order, and copy it.
#pragma once

#include <cstdint>

#include "zr/isa.hpp"
#include "zr/ordered_reduce.hpp"

// Reduces elements [first, first + count) of n sources, in rank order, to every out (zr::ordered_reduce).
ZR_KERNEL(void reduce_ranks(const zr::ReduceKind& kind, const void* const* sources, int32_t n, void* const* outs,
                            int32_t n_outs, int64_t first, int64_t count, bool streams))
// Copies; dst and src must not overlap. `streams`: with non-temporal stores.
ZR_KERNEL(void copy_range(void* dst, const void* src, int64_t bytes, bool streams))
