// AdamW for memory of a device, and for host memory.
#include "../device_kernels/on_device.hpp"
#include "adamw.hpp"
#include "device_kernel.hpp"

namespace {

class AdamW : public AdamWOptimizer<AdamW>, public device_kernels::OnDevice {
 public:
  using AdamWOptimizer::AdamWOptimizer;

  static void update_on_device(const zr::DeviceUpdate<AdamW>& u) {
    device_kernels::in_batches<AdamWBatch>(
        u.size(),
        [&](uint32_t i, AdamWSlice& to) {
          const zr_update_slice& slice = u.slice(i);
          to = adamw_slice(slice, u.group(i).hyperparameters_.constants(u.job.grad_mul, slice.step, slice.lr));
          return true;
        },
        [&](const AdamWBatch& batch) { adamw_on_device(batch, u.device, u.native_stream); });
  }
};

}  // namespace

ZR_OPTIMIZER(AdamW, "adamw", "zeroth", "0.1.0");
