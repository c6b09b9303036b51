// The two things a rank does with its peers' memory: fold it in rank order, and copy it.
#pragma once

#include <cstdint>

#include "zr/isa.hpp"
#include "zr/ordered_reduce.hpp"

// Elements [first, first + count) of n sources, in rank order, to every out (zr::ordered_reduce).
ZR_KERNEL(void reduce_ranks(const zr::ReduceKind& kind, const void* const* sources, int32_t n, void* const* outs,
                            int32_t n_outs, int64_t first, int64_t count, bool streams))
// dst and src do not overlap.
ZR_KERNEL(void copy_range(void* dst, const void* src, int64_t bytes, bool streams))
