// AdamW for memory of a device, and for host memory. ZR_ADAMW_DEVICE: the type of the device.
#include "adamw.hpp"
#include "device_kernel.hpp"
#include "zr/device_optimizer.hpp"

namespace {

class AdamW : public AdamWOptimizer<AdamW> {
 public:
  static constexpr uint64_t device_types = uint64_t{1} << ZR_ADAMW_DEVICE;
  using AdamWOptimizer::AdamWOptimizer;

  static void update_on_device(const zr::DeviceUpdate<AdamW>& u) {
    AdamWBatch batch;
    for (uint32_t i = 0; i < u.size(); ++i) {
      const zr_update_slice& slice = u.slice(i);
      const bool fp32 = slice.weight.dtype == ZR_F32;
      batch.slices[batch.n++] = {zr::data<float>(fp32 ? slice.weight : slice.master),
                                 zr::data<const float>(slice.grad),
                                 zr::data<float>(slice.slots[0]),
                                 zr::data<float>(slice.slots[1]),
                                 fp32 ? nullptr : zr::data<uint16_t>(slice.weight),
                                 slice.count,
                                 u.group(i).hyperparameters.constants(u.job.grad_mul, slice.step, slice.lr),
                                 slice.weight.dtype};
      if (batch.n < AdamWBatch::kSlices && i + 1 < u.size()) continue;
      adamw_on_device(batch, u.device, u.native_stream);
      batch.n = 0;
    }
  }

  static void norm_blocks(const zr::DeviceBlocks& b) {
    NormBatch batch;
    double* sums = b.sums;
    int64_t blocks = 0;
    for (uint32_t i = 0; i < b.n; ++i) {
      batch.values[batch.n] = zr::data<const float>(b.values[i]);
      batch.counts[batch.n++] = b.values[i].count;
      blocks += (b.values[i].count + b.block - 1) / b.block;
      if (batch.n < NormBatch::kViews && i + 1 < b.n) continue;
      norm_blocks_on_device(batch, b.block, sums, b.device, b.native_stream);
      sums += blocks;
      blocks = 0;
      batch.n = 0;
    }
  }
};

}  // namespace

ZR_OPTIMIZER(AdamW, "adamw", "zeroth", "0.1.0");
