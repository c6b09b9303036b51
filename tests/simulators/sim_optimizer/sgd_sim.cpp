// The kernel of SGD for the simulated device, with the CPU's arithmetic.
#include "sgd/device_kernel.hpp"
#include "sgd/kernel.hpp"
#include "sim_stream.hpp"

using sim::backing;

void sgd_on_device(const SgdBatch& batch, zr_device, void* native_stream) {
  sim::enqueue_batch(native_stream, "sgd", batch, [](const SgdSlice& s) {
    portable::sgd(s.constants,
                  {backing(s.weight), backing(s.grad), backing(s.buffer), s.count, backing(s.out), s.out_dtype, false});
  });
}
