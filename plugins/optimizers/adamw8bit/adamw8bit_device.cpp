// AdamW with 8-bit states for memory of a device, and for host memory.
#include "../adamw/device_kernel.hpp"
#include "../device_kernels/on_device.hpp"
#include "adamw8bit.hpp"
#include "device_kernel.hpp"

namespace {

class AdamW8Bit : public AdamW8BitOptimizer<AdamW8Bit>, public device_kernels::OnDevice {
 public:
  using AdamW8BitOptimizer::AdamW8BitOptimizer;

  static void update_on_device(const zr::DeviceUpdate<AdamW8Bit>& u) {
    const auto constants_of = [&](uint32_t i) {
      return u.group(i).hyperparameters_.constants(u.job.grad_mul, u.slice(i).step, u.slice(i).lr);
    };
    device_kernels::in_batches<AdamW8Batch>(
        u.size(),
        [&](uint32_t i, AdamW8Slice& to) {
          const zr_update_slice& slice = u.slice(i);
          if (!has_8bit_states(slice)) return false;
          to = {device_kernels::arrays_of(slice), zr::data<uint8_t>(slice.slots[0]), zr::data<uint8_t>(slice.slots[1]),
                zr::data<float>(slice.slots[2]),  zr::data<float>(slice.slots[3]),   constants_of(i)};
          return true;
        },
        [&](const AdamW8Batch& batch) { adamw8_on_device(batch, u.device, u.native_stream); });
    device_kernels::in_batches<AdamWBatch>(
        u.size(),
        [&](uint32_t i, AdamWSlice& to) {
          if (has_8bit_states(u.slice(i))) return false;
          to = adamw_slice(u.slice(i), constants_of(i));
          return true;
        },
        [&](const AdamWBatch& batch) { adamw_on_device(batch, u.device, u.native_stream); });
  }
};

}  // namespace

ZR_OPTIMIZER(AdamW8Bit, "adamw8bit", "zeroth", "0.1.0");
