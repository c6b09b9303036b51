// The two things a rank does with its peers' memory: fold it in rank order, and copy it.
#pragma once

#include <cstdint>

#include "zr/fold.hpp"
#include "zr/isa.hpp"

// Elements [first, first + count) of n sources, in rank order, to every out (zr::fold).
ZR_KERNEL(void fold_ranks(const zr::FoldKind& kind, const void* const* sources, int32_t n, void* const* outs,
                          int32_t n_outs, int64_t first, int64_t count, bool streams))
// dst and src do not overlap.
ZR_KERNEL(void copy_range(void* dst, const void* src, int64_t bytes, bool streams))
