// A stream of libtorch for plug-ins, without the host.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "contract/optimizer_under_test.hpp"
#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/device.h"

namespace zr::testing {

// A stream of libtorch, as the host passes it to plug-ins.
struct Stream {
  at::Device device;
  c10::Stream stream;
  explicit Stream(at::Device on) : device(on), stream(c10::impl::VirtualGuardImpl(on.type()).getDefaultStream(on)) {}
  zr_stream* abi() { return reinterpret_cast<zr_stream*>(this); }
  zr_device device_of_views() const {
    return {device.is_cuda() ? int32_t{ZR_DEVICE_CUDA} : int32_t{ZR_DEVICE_EXTENSION}, device.index()};
  }
};
inline const zr_stream_service kStreams{
    sizeof(zr_stream_service),
    0,
    [](zr_stream* stream) { return reinterpret_cast<Stream*>(stream)->stream.native_handle(); },
    [](zr_stream* stream) { return reinterpret_cast<Stream*>(stream)->device_of_views(); },
    nullptr,  // no streams of the optimizer's own, and no events
    nullptr,
    nullptr,
    nullptr,
    nullptr};

inline zr_host host_with_streams() {
  zr_host host = make_host();
  host.service = [](const zr_host*, const char* id) -> const void* {
    if (std::string(id) == "zr.host.config/1") return &kConfigService;
    if (std::string(id) == "zr.host.async/1") return &kAsyncService;
    return std::string(id) == "zr.host.stream/1" ? &kStreams : nullptr;
  };
  return host;
}

inline void wait_for(at::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

inline zr_view view_of(const torch::Tensor& tensor, const zr_device& device) {
  if (!tensor.defined()) return {nullptr, 0, ZR_F32, 0, device};
  static const std::map<at::ScalarType, zr_dtype> dtypes{
      {at::kByte, ZR_U8}, {at::kBFloat16, ZR_BF16}, {at::kHalf, ZR_F16}, {at::kFloat, ZR_F32}, {at::kDouble, ZR_F64}};
  return {tensor.data_ptr(), tensor.numel(), dtypes.at(tensor.scalar_type()), 0, device};
}

}  // namespace zr::testing
