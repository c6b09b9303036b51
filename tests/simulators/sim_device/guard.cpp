// Registration of the backend: its name, the device guard (devices, streams, events) and the accelerator hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

const bool named = (c10::register_privateuse1_backend("sim"), true);

// The state of the last record().
struct Event {
  StreamQueue* queue = nullptr;
  uint64_t ticket = 0;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

struct SimGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, device.has_index() ? device.index() : current_device()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return pool_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return new_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_queue(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    StreamQueue& queue = stream_queue(stream);
    return queue.poll(queue.last_ticket());
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream_queue(stream)); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event;
    auto& e = *static_cast<Event*>(*event);
    auto time = std::make_shared<std::chrono::steady_clock::time_point>();
    e.queue = &stream_queue(stream);
    e.time = time;
    e.ticket = e.queue->enqueue(
        "event", [time] { *time = std::chrono::steady_clock::now(); }, /*delayed=*/false);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Event e = *static_cast<Event*>(event);
    StreamQueue& queue = stream_queue(stream);
    if (&queue != e.queue && !drops_wait(queue))
      queue.enqueue(
          "wait", [e] { e.queue->wait(e.ticket); }, /*delayed=*/false);
  }
  bool queryEvent(void* event) const override {
    const auto* const e = static_cast<Event*>(event);
    return e == nullptr || has_defect("early") || e->queue->poll(e->ticket);
  }
  void synchronizeEvent(void* event) const override {
    const auto* const e = static_cast<Event*>(event);
    if (e != nullptr && !drops_host_wait()) synchronize(*e->queue, e->ticket);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(from != nullptr && to != nullptr && queryEvent(from) && queryEvent(to),
                "sim: both events must be recorded and complete");
    const auto length = *static_cast<Event*>(to)->time - *static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(length).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (!has_defect("reuse")) allocator().recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

struct SimHooks final : public at::PrivateUse1HooksInterface {
  void init() const override { TORCH_CHECK(!has_defect("driver"), "Found no driver of the simulated device"); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0 && !has_defect("driver"); }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  at::Device getDeviceFromPtr(void* data) const override { return {kSim, device_of(data)}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new SimHooks), true);

}  // namespace
}  // namespace zr::test::sim
