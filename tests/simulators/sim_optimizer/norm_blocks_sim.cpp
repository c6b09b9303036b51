// The sums of squares of norm blocks on the simulated device.
#include <algorithm>

#include "device_kernels/norm_blocks.hpp"
#include "sim_stream.hpp"

namespace device_kernels {

namespace {
double norm_block(const float* values, int64_t count) {
  double lanes[kNormLanes] = {};
  for (int64_t i = 0; i < count; ++i)
    lanes[i % kNormLanes] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}
}  // namespace

void norm_blocks_on_device(const NormBatch& batch, int64_t block, zr_device, void* native_stream) {
  sim::enqueue_batch(native_stream, "norm blocks", batch, [block](const NormView& view) {
    for (int64_t first = 0; first < view.count; first += block)
      sim::backing(view.sums)[first / block] =
          norm_block(sim::backing(view.values) + first, std::min(block, view.count - first));
  });
}

}  // namespace device_kernels
