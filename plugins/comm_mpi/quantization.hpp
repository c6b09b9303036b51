// The form of values that pass between hosts as small integers: blocks, each with a scale in fp32 and then one integer
// per value, of 8 bits (-127 to 127, blocks of 128 values) or 4 bits (-7 to 7, blocks of 64). A value is
// integer * scale; scale is the largest magnitude of the block / 127 or / 7.
//
// A block with an infinity or a NaN becomes NaN. A block without a magnitude of 2^-100 or more becomes +0.
#pragma once

#include <cstdint>

#include "zr/abi/communicator.h"
#include "zr/isa.hpp"

namespace mpi {
constexpr int kBlockOf8Bits = 128, kBlockOf4Bits = 64;  // values
}

// Encodes `count` values of fp32, bf16 or fp16. `to` may be `from`.
ZR_KERNEL(void quantize(int bits, zr_dtype dtype, const void* from, int64_t count, void* to))
// Decodes them. `from` may be the end of the memory at `to`.
ZR_KERNEL(void dequantize(int bits, const void* from, zr_dtype dtype, int64_t count, void* to))
// Decodes them and adds them to `to`.
ZR_KERNEL(void add_quantized(int bits, const void* from, int64_t count, float* to))

#ifndef ZR_ISA
namespace mpi {

inline constexpr int64_t kFewest = 128;  // values of a part of a gather; fewer are gathered exactly

/// The number of bits of a quantized operation; 0: it is not quantized.
inline int bits_of(const zr_coll& coll) { return coll.flags & ZR_COLL_INT4 ? 4 : coll.flags & ZR_COLL_INT8 ? 8 : 0; }

/// Bytes of so many encoded values; fewer than those of the values themselves if there are at least kFewest.
inline int64_t encoded_bytes(int bits, int64_t count) {
  const int64_t block = bits == 8 ? kBlockOf8Bits : kBlockOf4Bits;
  return (count + block - 1) / block * int64_t{sizeof(float)} + (count * bits + 7) / 8;
}

/// The kernels for this machine.
struct Quantization {
  decltype(ZR_CHOOSE(quantize)) encode = ZR_CHOOSE(quantize);
  decltype(ZR_CHOOSE(dequantize)) decode = ZR_CHOOSE(dequantize);
  decltype(ZR_CHOOSE(add_quantized)) add = ZR_CHOOSE(add_quantized);
};

}  // namespace mpi
#endif
