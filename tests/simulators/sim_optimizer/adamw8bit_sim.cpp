// The kernel of AdamW with 8-bit states for the simulated device, with the CPU's arithmetic.
#include "adamw8bit/device_kernel.hpp"
#include "adamw8bit/kernel.hpp"
#include "sim_stream.hpp"

using sim::backing;

void adamw8_on_device(const AdamW8Batch& batch, zr_device, void* native_stream) {
  sim::enqueue_batch(native_stream, "adamw8bit", batch, [](const AdamW8Slice& s) {
    portable::adamw8(s.constants,
                     {backing(s.weight), backing(s.grad), backing(s.exp_avg), backing(s.exp_avg_sq),
                      backing(s.exp_avg_scale), backing(s.exp_avg_sq_scale), s.count, backing(s.out), s.out_dtype});
  });
}
