// The entries of one launch on a device, such as slices: one call of a plug-in may have more than fit a launch.
#pragma once

#include <cstdint>

#include "zr/abi/base.h"
#include "zr/abi/optimizer.h"
#include "zr/base.hpp"

namespace device_kernels {

/// The entries of one launch. A kernel for CUDA gets them as a parameter, and its parameters have at most 32 KB.
template <class Entry, uint32_t MaxEntries>
struct Batch {
  static constexpr uint32_t kEntries = MaxEntries;
  uint32_t n = 0;
  uint32_t unused = 0;
  Entry entries[MaxEntries];
};

/// Calls fill(i, entry) for each i below n, which sets the entry, or returns false to leave out i, and
/// launch(batch) for as many entries as fit a batch of type B.
template <class B, class Fill, class Launch>
void in_batches(uint32_t n, const Fill& fill, const Launch& launch) {
  B batch;
  for (uint32_t i = 0; i < n; ++i) {
    if (!fill(i, batch.entries[batch.n])) continue;
    ++batch.n;
    if (batch.n < B::kEntries) continue;
    launch(batch);
    batch.n = 0;
  }
  if (batch.n > 0) launch(batch);
}

/// The arrays of a slice that every optimizer has.
struct SliceArrays {
  float* weight;  // the fp32 master weight
  const float* grad;
  uint16_t* out;  // the rounded weight, or null
  int64_t count;
  zr_dtype out_dtype;
};
inline SliceArrays arrays_of(const zr_update_slice& slice) {
  const bool fp32 = slice.weight.dtype == ZR_F32;
  return {zr::data<float>(fp32 ? slice.weight : slice.master), zr::data<const float>(slice.grad),
          fp32 ? nullptr : zr::data<uint16_t>(slice.weight), slice.count, slice.weight.dtype};
}

}  // namespace device_kernels
