// The streams and events that plug-ins get ("zr.host.stream/1") of the simulated accelerator of
// tests/simulators/sim_device: order across streams, and what happens without it.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "base/draft_abi.hpp"
#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "model/torch_device_memory.hpp"
#include "plugin/plugin_host.hpp"

namespace zr::host {
namespace {

class DeviceStreamsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    library_ = ::dlopen(ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so", RTLD_NOW | RTLD_GLOBAL);
    ASSERT_NE(library_, nullptr) << ::dlerror();
  }
  DeviceStreamsTest() : memory_(at::Device("sim:0")) {
    const zr_host* const abi = plugins_.abi();
    streams_ = static_cast<const zr_stream_service*>(abi->service(abi, "zr.host.stream/1"));
    for (float** each : {&source_, &target_}) *each = static_cast<float*>(memory_.allocate(sizeof(float)));
    zr_error error{};
    EXPECT_EQ(streams_->create(main(), &own_, &error), ZR_OK) << error.msg;
  }
  ~DeviceStreamsTest() override {
    for (zr_stream* stream : {main(), own_})  // a test without waits leaves tasks
      function<void(void*)>("zr_sim_wait")(streams_->native(stream));
    streams_->event_free(event_);
    streams_->destroy(own_);
    memory_.free(source_);
    memory_.free(target_);
  }

  zr_stream* main() { return memory_.abi(); }
  // Makes `later` wait for what `earlier` contains now.
  void order(zr_stream* earlier, zr_stream* later) {
    zr_error error{};
    EXPECT_EQ(streams_->record(earlier, &event_, &error), ZR_OK) << error.msg;
    EXPECT_EQ(streams_->wait(later, event_, &error), ZR_OK) << error.msg;
  }
  // Enqueues a task that sleeps, and then sets *to, unless `to` is null, to `value` or to *from.
  void enqueue(zr_stream* stream, float* to, const float* from, float value) {
    struct Task {
      float *to, *from, value;
    };
    const auto run = [](void* context) {
      const std::unique_ptr<Task> task(static_cast<Task*>(context));
      std::this_thread::sleep_for(kLate);
      if (task->to) *task->to = task->from ? *task->from : task->value;
    };
    function<void(void*, const char*, void (*)(void*), void*)>("zr_sim_enqueue")(
        streams_->native(stream), "late", run,
        new Task{to ? backing(to) : nullptr, from ? backing(from) : nullptr, value});
  }
  // What the engine's stream sees after: 3 is written to `source` there, and copied to `target` on the own stream.
  float copied(bool own_waits, bool main_waits) {
    enqueue(main(), source_, nullptr, 3);
    if (own_waits) order(main(), own_);
    enqueue(own_, target_, source_, 0);
    if (main_waits) order(own_, main());
    float seen = -1;
    memory_.download(target_, &seen, sizeof seen);
    return seen;
  }

  static constexpr std::chrono::milliseconds kLate{150};
  template <class Function>
  static Function* function(const char* name) {
    return reinterpret_cast<Function*>(::dlsym(library_, name));
  }
  static float* backing(const float* memory) {
    return static_cast<float*>(function<void*(const void*)>("zr_sim_backing")(memory));
  }

  static inline void* library_ = nullptr;
  Ledger ledger_;
  ThreadPool pool_{1};
  plugin::PluginHost plugins_{ledger_, pool_};
  model::TorchDeviceMemory memory_;
  const zr_stream_service* streams_ = nullptr;
  zr_stream* own_ = nullptr;
  zr_event* event_ = nullptr;
  float *source_ = nullptr, *target_ = nullptr;
};

TEST_F(DeviceStreamsTest, AreOrderedByEvents) {
  EXPECT_EQ(copied(true, true), 3);
  EXPECT_NE(event_, nullptr);
}

TEST_F(DeviceStreamsTest, WithoutTheFirstWaitTheCopyIsTooEarly) {
  enqueue(main(), nullptr, nullptr, 0);  // so that the engine's stream is later than the own one
  EXPECT_EQ(copied(false, true), 0);
}

TEST_F(DeviceStreamsTest, WithoutTheSecondWaitTheCopyIsTooLate) { EXPECT_EQ(copied(true, false), 0); }

TEST_F(DeviceStreamsTest, AreOnTheSameDeviceAndHaveHandlesOfTheirOwn) {
  EXPECT_EQ(streams_->device(own_).type, streams_->device(main()).type);
  EXPECT_EQ(streams_->device(own_).type, int32_t{ZR_DEVICE_EXTENSION});
  EXPECT_EQ(streams_->device(own_).id, 0);
  EXPECT_NE(streams_->native(own_), streams_->native(main()));
  zr_stream* other = nullptr;
  zr_error error{};
  ASSERT_EQ(streams_->create(own_, &other, &error), ZR_OK) << error.msg;
  EXPECT_NE(streams_->native(other), streams_->native(own_));
  streams_->destroy(other);
}

// A stream of a device that offers neither events nor other streams.
struct BareStream final : DeviceStream {
  zr_device device() const override { return {ZR_DEVICE_EXTENSION, 0}; }
  void* native_stream() override { return nullptr; }
};

TEST_F(DeviceStreamsTest, ReportWhatADeviceDoesNotOffer) {
  BareStream bare;
  zr_error error{};
  zr_stream* made = own_;
  EXPECT_EQ(streams_->create(bare.abi(), &made, &error), ZR_UNSUPPORTED);
  EXPECT_STREQ(error.msg, "create a stream: the engine does not offer it on this device");
  EXPECT_EQ(made, own_);
  zr_event* event = nullptr;
  EXPECT_EQ(streams_->record(bare.abi(), &event, &error), ZR_UNSUPPORTED);
  EXPECT_EQ(event, nullptr);
  streams_->destroy(nullptr);
  streams_->event_free(nullptr);
}

}  // namespace
}  // namespace zr::host
