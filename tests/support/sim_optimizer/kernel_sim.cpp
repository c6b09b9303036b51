// The kernels of AdamW for the simulated device: tasks on its streams, with the CPU's arithmetic.
#include <algorithm>

#include "../sim_device/device_calls.hpp"
#include "device_kernel.hpp"
#include "kernel.hpp"

namespace {

using sim::backing;
using sim::enqueue;

double norm_block(const float* values, int64_t count) {
  double lanes[16] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i % 16] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void adamw_on_device(const AdamWBatch& batch, zr_device, void* native_stream) {
  enqueue(native_stream, "adamw", [batch] {
    for (uint32_t i = 0; i < batch.n; ++i) {
      const AdamWSlice& slice = batch.slices[i];
      portable::adamw(slice.constants,
                      {backing(slice.weight), backing(slice.grad), backing(slice.exp_avg), backing(slice.exp_avg_sq),
                       slice.count, slice.out ? backing(slice.out) : nullptr, slice.out_dtype, false});
    }
  });
}

void norm_blocks_on_device(const NormBatch& batch, int64_t block, double* sums, zr_device, void* native_stream) {
  enqueue(native_stream, "norm blocks", [batch, block, sums] {
    double* to = backing(sums);
    for (uint32_t i = 0; i < batch.n; ++i)
      for (int64_t first = 0; first < batch.counts[i]; first += block)
        *to++ = norm_block(backing(batch.values[i]) + first, std::min(block, batch.counts[i] - first));
  });
}
