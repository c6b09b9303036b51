// "zr.host.stream/1": the streams that plug-ins get are objects of DeviceMemory.
#include "base/device_memory.hpp"
#include "plugin/services.hpp"

namespace zr::host::plugin {

const zr_stream_service kStreamService{sizeof(zr_stream_service), 0,
                                       [](zr_stream* stream) { return DeviceMemory::from_abi(stream).native_stream(); },
                                       [](zr_stream* stream) { return DeviceMemory::from_abi(stream).device(); }};

}  // namespace zr::host::plugin
