// The arithmetic of 1-bit Adam for one block, and the update with its result. docs/optimizers.md has the order.
#pragma once

#include <cstdint>

#include "../adamw/kernel.hpp"
#include "zr/abi/base.h"
#include "zr/isa.hpp"

namespace onebit {

/// Elements that share a scale: a norm block, inside of which no plan is cut.
inline constexpr int64_t kBlock = 1024;
/// A compressed block: the scale as fp32, then one bit per element, set if it is not negative.
constexpr int64_t words_of(int64_t count) { return 1 + (count + 31) / 32; }
/// The words of consecutive blocks, of which only the last one may be shorter than kBlock.
constexpr int64_t words_of_blocks(int64_t count) {
  return count / kBlock * words_of(kBlock) + (count % kBlock ? words_of(count % kBlock) : 0);
}

struct Factors {  // rounded once to fp32
  float mul;      // of the gradient sum
  float gain1;    // 1 - beta1
  float beta1;
  bool begins;  // the carry is the momentum
};

}  // namespace onebit

// Each works on one block of `count` elements.
/// Compresses this rank's momentum into `words`, and leaves the error in `carry`.
ZR_KERNEL(void onebit_compress(const onebit::Factors& factors, const float* grad, float* carry, int64_t count,
                               uint32_t* words))
/// Averages what the ranks have sent, at `received`, `received + stride` and so on, and compresses the mean and
/// `error` into `words`, where the new error is left.
ZR_KERNEL(void onebit_serve(const uint32_t* received, int64_t stride, int32_t world, float* error, int64_t count,
                            uint32_t* words))
/// Writes the common momentum to `momentum`, and adds its part of the next step to `carry`.
ZR_KERNEL(void onebit_decode(const uint32_t* words, float beta1, float* momentum, float* carry, int64_t count))
/// The update: run.grad is the momentum. Without run.exp_avg the momentum is not stored.
ZR_KERNEL(void onebit_update(const AdamWConstants& constants, const AdamWRun& run))
