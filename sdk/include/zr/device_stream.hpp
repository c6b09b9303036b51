// The streams that the host passes to plug-ins, the device's own handle for them, streams of a plug-in's own, and
// events. This is a draft: a library that includes it loads only on a host of this version (zr/abi/draft/device.h).
#pragma once

#include <utility>

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

/// A point of a stream (zr_event). Movable.
class StreamEvent {
 public:
  /// An event that is not recorded. The host must outlive it.
  explicit StreamEvent(const Host& host) : service_(&host.need<zr_stream_service>()) {}
  ~StreamEvent() { service_->event_free(event_); }
  /// `other` is not recorded afterwards.
  StreamEvent(StreamEvent&& other) noexcept : service_(other.service_), event_(other.event_) { other.event_ = nullptr; }
  /// Exchanges the events.
  StreamEvent& operator=(StreamEvent&& other) noexcept {
    std::swap(service_, other.service_);
    std::swap(event_, other.event_);
    return *this;
  }
  /// The event becomes the current end of the stream. [step] [use]
  void record(zr_stream* stream) {
    zr_error error{};
    check(service_->record(stream, &event_, &error), error);
  }
  /// What is enqueued on the stream later begins after the event, which has been recorded. Does not wait. [step] [use]
  void block(zr_stream* stream) const {
    zr_error error{};
    check(service_->wait(stream, event_, &error), error);
  }

 private:
  const zr_stream_service* service_;
  zr_event* event_ = nullptr;
};

/// A stream of a plug-in's own, on the device of another one. Movable.
class OwnStream {
 public:
  /// Makes a stream on the device of `like`, which the host passed. The host must outlive it. [step] [use]
  OwnStream(const Host& host, zr_stream* like) : service_(&host.need<zr_stream_service>()), event_(host) {
    zr_error error{};
    check(service_->create(like, &stream_, &error), error);
  }
  ~OwnStream() { service_->destroy(stream_); }
  /// `other` has no stream afterwards.
  OwnStream(OwnStream&& other) noexcept
      : service_(other.service_), stream_(other.stream_), event_(std::move(other.event_)) {
    other.stream_ = nullptr;
  }
  /// Exchanges the streams.
  OwnStream& operator=(OwnStream&& other) noexcept {
    std::swap(service_, other.service_);
    std::swap(stream_, other.stream_);
    std::swap(event_, other.event_);
    return *this;
  }
  zr_stream* get() const { return stream_; }                  // for calls through the ABI
  void* native() const { return service_->native(stream_); }  // a cudaStream_t on a CUDA device
  /// What is enqueued here later begins after what `earlier` contains now. Does not wait. [step] [use]
  void follow(zr_stream* earlier) {
    event_.record(earlier);
    event_.block(stream_);
  }
  /// What is enqueued on `later` later begins after what this stream contains now. Does not wait. [step] [use]
  void precede(zr_stream* later) {
    event_.record(stream_);
    event_.block(later);
  }

 private:
  const zr_stream_service* service_;
  zr_stream* stream_ = nullptr;
  StreamEvent event_;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
