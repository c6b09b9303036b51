// Copies that are launched later than they were requested are seen by every later operation. Runs on the simulated
// accelerator of tests/simulators/sim_device.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "model/torch_device_memory.hpp"
#include "simulators/sim_device/device_calls.hpp"

namespace zr::host {
namespace {

class DeviceMemoryTest : public ::testing::Test {
 protected:
  static constexpr int64_t kElements = 1000, kBytes = kElements * 4;
  static void SetUpTestSuite() {
    library_ = ::dlopen(ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so", RTLD_NOW | RTLD_GLOBAL);
    ASSERT_NE(library_, nullptr) << ::dlerror();
  }
  DeviceMemoryTest()
      : memory_(at::Device("sim:0")), data_(memory_.allocate(kBytes)), other_(memory_.allocate(kBytes)) {}
  ~DeviceMemoryTest() override {
    memory_.free(data_);
    memory_.free(other_);
  }
  static at::Tensor values(double first) {
    return torch::arange(first, first + kElements, torch::TensorOptions().device("sim:0").dtype(torch::kFloat));
  }
  zr_view view(void* memory, int64_t first = 0, int64_t count = kElements, zr_dtype dtype = ZR_F32) const {
    return {static_cast<char*>(memory) + first * size_of(dtype), count, dtype, 0, memory_.device()};
  }
  // The first and the last element.
  std::pair<float, float> ends(const void* memory) {
    std::vector<float> copy(kElements);
    memory_.download(memory, copy.data(), kBytes);
    return {copy.front(), copy.back()};
  }

  static inline void* library_ = nullptr;
  model::TorchDeviceMemory memory_;
  void *const data_, *const other_;
};

using Ends = std::pair<float, float>;

TEST_F(DeviceMemoryTest, LaterCopiesOfSeveralPartsAreDownloaded) {
  memory_.copy_later(values(5), 100, view(data_, 0, 400));
  memory_.copy_later(values(1000).reshape({10, 100}), 0, view(data_, 400, 600));
  EXPECT_EQ(ends(data_), (Ends{105, 1599}));
}

// A tensor that is not in row-major order, of another type, or computed on another stream is copied at once.
TEST_F(DeviceMemoryTest, CopiesTensorsOfOtherTypesAndLayouts) {
  memory_.copy_later(values(7).to(torch::kHalf), 0, view(data_));
  EXPECT_EQ(ends(data_), (Ends{7, 1006}));
  memory_.copy_later(values(0).reshape({10, 100}).t(), 0, view(data_));
  EXPECT_EQ(ends(data_), (Ends{0, 999}));
  memory_.copy_later(values(0).reshape({10, 100}).t(), 10, view(data_, 0, 990));
  EXPECT_EQ(ends(data_).first, 1) << "the second row of the transposed tensor";
}

TEST_F(DeviceMemoryTest, EveryOperationSeesLaterCopies) {
  const Ends copied{3, 1002};
  memory_.copy_later(values(3), 0, view(data_));
  memory_.copy(view(data_), view(other_));
  EXPECT_EQ(ends(other_), copied) << "copy";
  memory_.copy_later(values(4), 0, view(data_));
  memory_.add(view(data_), view(other_), false);
  EXPECT_EQ(ends(other_), (Ends{7, 2005})) << "add";
  memory_.copy_later(values(0).log(), 0, view(data_));
  EXPECT_EQ(memory_.count_non_finite(view(data_)), 1) << "count_non_finite: log(0)";
  memory_.copy_later(values(3), 0, view(data_));
  memory_.zero(view(data_));
  EXPECT_EQ(ends(data_), (Ends{0, 0})) << "zero";
  memory_.copy_later(values(3), 0, view(data_));
  const std::vector<float> ones(kElements, 1);
  memory_.upload(ones.data(), data_, kBytes);
  EXPECT_EQ(ends(data_), (Ends{1, 1})) << "upload";
  memory_.copy_later(values(3), 0, view(data_));
  memory_.run([&](zr_stream*) {  // on its stream, which is the current one
    model::tensor_over(other_, {kElements}, at::kFloat, at::Device("sim:0"))
        .copy_(model::tensor_over(data_, {kElements}, at::kFloat, at::Device("sim:0")));
  });
  EXPECT_EQ(ends(other_), copied) << "run";
}

TEST_F(DeviceMemoryTest, OtherStreamsSeeLaterCopies) {
  const std::unique_ptr<PinnedMemory> pinned = memory_.allocate_pinned(kBytes);
  const std::unique_ptr<CopyStream> copies = memory_.new_copy_stream();
  memory_.copy_later(values(3), 0, view(data_));
  copies->follow_computation();
  copies->to_host(data_, *pinned, 0, kBytes);
  copies->mark()->wait();
  EXPECT_EQ(reinterpret_cast<const float*>(pinned->data())[kElements - 1], 1002);
  memory_.copy_later(values(9), 0, view(data_));
  copies->to_device(*pinned, 0, other_, kBytes);
  copies->lead_computation();
  EXPECT_EQ(ends(other_), (Ends{3, 1002}));
  memory_.copy_later(values(5), 0, view(data_));
  const std::unique_ptr<DeviceStream> stream = memory_.new_stream();
  stream->wait_for(*memory_.mark(nullptr));
  EXPECT_EQ(ends(data_), (Ends{5, 1004}));
}

// Such as a stream that waits for a peer which is lost.
TEST_F(DeviceMemoryTest, ACopyStreamIsClosedWhileTheComputationDoesNotEnd) {
  const c10::Stream computation = c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDefaultStream(at::Device("sim:0"));
  std::atomic<bool> may_end = false;
  {
    const std::unique_ptr<PinnedMemory> pinned = memory_.allocate_pinned(kBytes);
    const std::unique_ptr<CopyStream> copies = memory_.new_copy_stream();
    sim::enqueue(computation.native_handle(), "endless", [&may_end] {
      while (!may_end) std::this_thread::yield();
    });
    copies->follow_computation();
    copies->to_host(data_, *pinned, 0, kBytes);
  }
  EXPECT_FALSE(computation.query()) << "the stream still waits";
  may_end = true;
  computation.synchronize();
}

// Uploads go through pinned memory, parts of which are used again when the copies from them are complete.
TEST_F(DeviceMemoryTest, PinnedMemoryIsUsedAgainAfterTheCopiesFromIt) {
  constexpr int64_t kUploads = 6, kUploadBytes = int64_t{16} << 20;  // more than four parts
  const auto set_late = reinterpret_cast<void (*)(int)>(::dlsym(library_, "zr_sim_set_late"));
  std::vector<void*> uploads;
  for (int64_t i = 0; i < kUploads; ++i) uploads.push_back(memory_.allocate(kUploadBytes));
  set_late(1);
  std::vector<float> values(kUploadBytes / 4);
  for (int64_t i = 0; i < kUploads; ++i) {
    std::fill(values.begin(), values.end(), static_cast<float>(i));
    memory_.upload(values.data(), uploads[static_cast<std::size_t>(i)], kUploadBytes);
  }
  for (int64_t i = 0; i < kUploads; ++i) {
    memory_.download(uploads[static_cast<std::size_t>(i)], values.data(), kUploadBytes);
    EXPECT_EQ(values.front(), static_cast<float>(i));
    EXPECT_EQ(values.back(), static_cast<float>(i));
  }
  set_late(0);
  for (void* const each : uploads) memory_.free(each);
}

// Memory that is freed may belong to somebody else at once.
TEST_F(DeviceMemoryTest, LaterCopiesRunBeforeMemoryIsFreed) {
  void* const freed = memory_.allocate(kBytes);
  memory_.copy_later(values(3), 0, view(freed));
  memory_.free(freed);
  const at::Tensor next = torch::zeros({kElements}, torch::TensorOptions().device("sim:0"));
  memory_.flush();
  EXPECT_EQ(next.sum().item<float>(), 0);
}

}  // namespace
}  // namespace zr::host
