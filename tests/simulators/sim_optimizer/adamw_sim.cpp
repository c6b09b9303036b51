// The kernel of AdamW for the simulated device, with the CPU's arithmetic.
#include "adamw/device_kernel.hpp"
#include "adamw/kernel.hpp"
#include "sim_stream.hpp"

using sim::backing;

void adamw_on_device(const AdamWBatch& batch, zr_device, void* native_stream) {
  sim::enqueue_batch(native_stream, "adamw", batch, [](const AdamWSlice& s) {
    portable::adamw(s.constants, {backing(s.weight), backing(s.grad), backing(s.states[0]), backing(s.states[1]),
                                  s.count, backing(s.out), s.out_dtype, false});
  });
}
