// The streams that the host passes to plug-ins, and the device's own handle for them. This is a draft: a library that
// includes it loads only on a host of this version (zr/abi/draft/device.h).
#pragma once

#include "zr/abi/draft/device.h"
#include "zr/base.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// The id of zr_stream_service.
template <>
inline constexpr const char* service_id<zr_stream_service> = "zr.host.stream/1";

/// The handle of the device's own library for a stream: a cudaStream_t on a CUDA device. [any]
inline void* native_stream(const Host& host, zr_stream* stream) {
  return host.need<zr_stream_service>().native(stream);
}

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
