// "zr.host.stream/1": the streams and events that plug-ins get are objects of DeviceStream and of its Mark.
#include <fmt/format.h>

#include <exception>
#include <memory>

#include "base/device_stream.hpp"
#include "base/error.hpp"
#include "plugin/services.hpp"

namespace zr::host::plugin {

namespace {

// Calls fn, which returns false if the device does not offer what `call` needs. Exceptions become an error `failed`.
template <class F>
zr_code call_device(const char* call, zr_error* error, const F& fn, zr_code failed = ZR_INTERNAL) {
  try {
    if (fn()) return ZR_OK;
    return fill_error(error, ZR_UNSUPPORTED, fmt::format("{}: the engine does not offer it on this device", call));
  } catch (const std::exception& failure) {
    return fill_error(error, failed, fmt::format("{}: {}", call, failure.what()));
  }
}

void* native(zr_stream* stream) { return DeviceStream::from_abi(stream).native_stream(); }

zr_device device(zr_stream* stream) { return DeviceStream::from_abi(stream).device(); }

// A backend without this function throws.
zr_code create(zr_stream* like, zr_stream** out, zr_error* error) {
  return call_device(
      "create a stream", error,
      [&] {
        std::unique_ptr<DeviceStream> made = DeviceStream::from_abi(like).new_stream();
        if (!made) return false;
        *out = made.release()->abi();
        return true;
      },
      ZR_UNSUPPORTED);
}

void destroy(zr_stream* stream) {
  if (stream) delete &DeviceStream::from_abi(stream);
}

void event_free(zr_event* event) {
  if (event) delete &DeviceStream::Mark::from_abi(event);
}

zr_code record(zr_stream* stream, zr_event** event, zr_error* error) {
  return call_device("record an event", error, [&] {
    std::unique_ptr<DeviceStream::Mark> mark = DeviceStream::from_abi(stream).mark(nullptr);
    if (!mark) return false;
    event_free(*event);
    *event = mark.release()->abi();
    return true;
  });
}

zr_code wait(zr_stream* stream, zr_event* event, zr_error* error) {
  return call_device("wait for an event", error, [&] {
    DeviceStream::from_abi(stream).wait_for(DeviceStream::Mark::from_abi(event));
    return true;
  });
}

}  // namespace

const zr_stream_service kStreamService{
    sizeof(zr_stream_service), 0, native, device, create, destroy, record, wait, event_free};

}  // namespace zr::host::plugin
