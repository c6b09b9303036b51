// Optimizers in C++ that update memory of a device. This is a draft: the library loads only on a host of this version
// (zr/abi/draft/device.h). The library has the file name of the optimizer for the CPU and is in a folder
// that is named after the type of the device (plugins/cuda); it also updates host memory.
//
// A class with this header included has, in addition to update(),
//
//   static constexpr uint64_t device_types = uint64_t{1} << ZR_DEVICE_CUDA;
//   static void update_on_device(const zr::DeviceUpdate<Mine>&);   // enqueues the update of all slices
//   static void norm_blocks(const zr::DeviceBlocks&);              // see zr_optimizer_device_api
//
// Both only enqueue on the stream, and must not wait, nor allocate memory of the host but in the first calls.
#pragma once

#include "zr/device_stream.hpp"
#include "zr/optimizer.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The slices of one call of zr_optimizer_api::step() with a stream. D: the author's class.
template <class D>
class DeviceUpdate {
 public:
  /// Made by the layer for one call.
  DeviceUpdate(const OptimizerLayer<D>& layer, const Host& of, const zr_step& step,
               const zr_update_slice* const* slices, uint32_t n, zr_stream* on)
      : job(step),
        host(of),
        stream(on),
        device(of.need<zr_stream_service>().device(on)),
        native_stream(zr::native_stream(of, on)),
        layer_(layer),
        slices_(slices),
        n_(n) {}
  const zr_step& job;                   // grad_mul; step count of the job
  const Host& host;                     // for streams of the optimizer's own (OwnStream)
  zr_stream* stream;                    // on which the update is enqueued
  zr_device device;                     // all memory is there
  void* native_stream;                  // a cudaStream_t on a CUDA device
  uint32_t size() const { return n_; }  // number of slices
  /// A slice; its memory is on the device.
  const zr_update_slice& slice(uint32_t i) const { return *slices_[i]; }
  /// The object of the slice's group.
  const D& group(uint32_t i) const { return layer_.group_of_slice(*slices_[i]); }

 private:
  const OptimizerLayer<D>& layer_;
  const zr_update_slice* const* slices_;
  uint32_t n_;
};

/// The arguments of zr_optimizer_device_api::norm_blocks().
struct DeviceBlocks {
  const zr_view* values;  // fp32
  uint32_t n;             // number of views
  int64_t block;          // elements of a norm block
  double* sums;           // one per block of all views
  zr_device device;       // all memory is there
  void* native_stream;    // a cudaStream_t on a CUDA device
};

/// The extension table of a class D.
template <class D>
struct DeviceLayer {
  static constexpr const char* id = "zr.optimizer.device/1";  // of the extension
  /// Implements step() with a stream.
  static void step(const OptimizerLayer<D>& layer, const Host& host, const zr_step& job,
                   const zr_update_slice* const* slices, uint32_t n, zr_stream* stream) {
    const auto& streams = host.need<zr_stream_service>();
    const zr_device device = streams.device(stream);
    for (uint32_t i = 0; i < n; ++i)
      for (const zr_view* view : {&slices[i]->weight, &slices[i]->grad, &slices[i]->master})
        if (view->count > 0 && (view->device.type != device.type || view->device.id != device.id))
          throw PluginError(ZR_INVALID, std::string("parameter ") + slices[i]->name +
                                            ": the slice is not in memory of the stream's device");
    D::update_on_device(DeviceUpdate<D>(layer, host, job, slices, n, stream));
  }
  /// Implements norm_blocks().
  static zr_code norm_blocks(void* self, const zr_view* values, uint32_t n, int64_t block, const zr_view* sums,
                             zr_stream* stream, zr_error* error) noexcept {
    return guard(error, [&] {
      const auto& streams = D::Layer::host(self).template need<zr_stream_service>();
      D::norm_blocks({values, n, block, data<double>(*sums), streams.device(stream), streams.native(stream)});
    });
  }
  /// The table.
  static constexpr zr_optimizer_device_api api{sizeof(zr_optimizer_device_api), 0, norm_blocks};
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
