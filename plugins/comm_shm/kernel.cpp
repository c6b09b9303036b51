#include "kernel.hpp"

namespace ZR_ISA {

void reduce_ranks(const zr::ReduceKind& kind, const void* const* sources, int32_t n, void* const* outs, int32_t n_outs,
                  int64_t first, int64_t count, bool streams) {
  zr::ordered_reduce(kind, sources, n, outs, n_outs, first, count, streams);
}

void copy_range(void* dst, const void* src, int64_t bytes, bool streams) { zr::copy_bytes(dst, src, bytes, streams); }

}  // namespace ZR_ISA
