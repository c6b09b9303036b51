// The base class of optimizers that update memory of a device. ZR_OPTIMIZER_DEVICE: the type of the device.
#pragma once

#include "norm_blocks.hpp"
#include "zr/device_optimizer.hpp"

namespace device_kernels {

struct OnDevice {
  static constexpr uint64_t device_types = uint64_t{1} << ZR_OPTIMIZER_DEVICE;

  static void norm_blocks(const zr::DeviceBlocks& b) {
    double* sums = b.sums;
    in_batches<NormBatch>(
        b.n,
        [&](uint32_t i, NormView& view) {
          view = {zr::data<const float>(b.values[i]), b.values[i].count, sums};
          sums += (view.count + b.block - 1) / b.block;
          return true;
        },
        [&](const NormBatch& batch) { norm_blocks_on_device(batch, b.block, b.device, b.native_stream); });
  }
};

}  // namespace device_kernels
