// SGD for memory of a device, and for host memory.
#include "../device_kernels/on_device.hpp"
#include "device_kernel.hpp"
#include "sgd.hpp"

namespace {

class Sgd : public SgdOptimizer<Sgd>, public device_kernels::OnDevice {
 public:
  using SgdOptimizer::SgdOptimizer;

  static void update_on_device(const zr::DeviceUpdate<Sgd>& u) {
    device_kernels::in_batches<SgdBatch>(
        u.size(),
        [&](uint32_t i, SgdSlice& to) {
          const zr_update_slice& slice = u.slice(i);
          const Sgd& group = u.group(i);
          to = {device_kernels::arrays_of(slice), group.has_buffer() ? zr::data<float>(slice.slots[0]) : nullptr,
                group.constants(u.job.grad_mul, slice.step, slice.lr)};
          return true;
        },
        [&](const SgdBatch& batch) { sgd_on_device(batch, u.device, u.native_stream); });
  }
};

}  // namespace

ZR_OPTIMIZER(Sgd, "sgd", "zeroth", "0.1.0");
