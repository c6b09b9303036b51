// Reductions on a CUDA device, for communicators.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "zr/ordered_reduce.hpp"

namespace peer {

/// Most sources and outs of a reduction together: a kernel gets their addresses as parameters, at most 4 KiB.
inline constexpr int kMaxReduceAddresses = 480;

/// zr::ordered_reduce() on the stream. The device of the stream is the current one.
void cuda_reduce(const zr::ReduceKind& kind, const void* const* sources, int n, void* const* outs, int n_outs,
                 int64_t first, int64_t count, cudaStream_t stream);

}  // namespace peer
