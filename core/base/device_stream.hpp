// A stream of a device, without the device's library: what plug-ins get as a zr_stream.
#pragma once

#include <memory>

#include "base/draft_abi.hpp"
#include "zr/abi/base.h"

namespace zr::host {

/// Operations run in the order in which they are enqueued. Any thread; the caller serialises.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual zr_device device() const = 0;
  /// The handle of the device's own library for the stream, such as a cudaStream_t.
  virtual void* native_stream() = 0;

  /// A point of a stream: what plug-ins get as a zr_event.
  class Mark {
   public:
    virtual ~Mark() = default;
    virtual bool is_reached() = 0;  // or the device has failed

    zr_event* abi() { return reinterpret_cast<zr_event*>(this); }
    static Mark& from_abi(zr_event* event) { return *reinterpret_cast<Mark*>(event); }
  };
  /// The current end of the stream; null: the device does not offer it. `unused`: one that may be used again, or null.
  virtual std::unique_ptr<Mark> mark(std::unique_ptr<Mark> /*unused*/) { return nullptr; }
  /// What is enqueued later begins after the mark, which is one of this device. Does not wait.
  virtual void wait_for(Mark& /*mark*/) {}
  /// A stream of the same device whose operations run at the same time; null: the device does not offer it.
  virtual std::unique_ptr<DeviceStream> new_stream() { return nullptr; }

  zr_stream* abi() { return reinterpret_cast<zr_stream*>(this); }
  static DeviceStream& from_abi(zr_stream* stream) { return *reinterpret_cast<DeviceStream*>(stream); }
};

}  // namespace zr::host
