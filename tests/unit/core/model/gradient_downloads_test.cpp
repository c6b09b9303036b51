// Gradients are delivered in their order, with their values, and at the same points however fast the device is. Runs on
// the simulated accelerator of tests/simulators/sim_device.
#include "model/gradient_downloads.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace zr::host {
namespace {

class GradientDownloadsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kElements = 1000, kBytes = kElements * 4;
  static void SetUpTestSuite() {
    library_ = ::dlopen(ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so", RTLD_NOW | RTLD_GLOBAL);
    ASSERT_NE(library_, nullptr) << ::dlerror();
  }
  static void delay(unsigned microseconds) {
    reinterpret_cast<void (*)(uint64_t, unsigned)>(::dlsym(library_, "zr_sim_set_delay"))(7, microseconds);
  }
  void TearDown() override { delay(0); }
  // A gradient whose elements are computed by several operators.
  void add(uint32_t param) {
    const at::Tensor zeros = torch::zeros({kElements}, torch::TensorOptions().device("sim:0"));
    downloads_.add(param, zeros.add(static_cast<double>(param)).mul(2));
  }
  std::vector<uint32_t> all_of(uint32_t n) const {
    std::vector<uint32_t> params(n);
    for (uint32_t i = 0; i < n; ++i) params[i] = i;
    return params;
  }

  static inline void* library_ = nullptr;
  std::vector<uint32_t> delivered_;
  int fails_at_ = -1;
  model::GradientDownloads downloads_{at::Device("sim:0"), 8 * kBytes,
                                      [this](uint32_t param, const at::Tensor& values) {
                                        if (static_cast<int>(param) == fails_at_)
                                          throw std::runtime_error("of delivery");
                                        EXPECT_TRUE(torch::equal(values, torch::full({kElements}, 2.0f * param)));
                                        delivered_.push_back(param);
                                      }};
};

TEST_F(GradientDownloadsTest, DeliversAtPointsThatDependOnSizesAlone) {
  for (const unsigned microseconds : {0u, 500u}) {
    delay(microseconds);
    delivered_.clear();
    for (uint32_t param = 0; param < 12; ++param) {
      add(param);
      EXPECT_EQ(delivered_.size(), param < 4 ? 0u : param - 3) << "four copies are in flight";
    }
    downloads_.finish();
    EXPECT_EQ(delivered_, all_of(12));
  }
}

TEST_F(GradientDownloadsTest, DeliversInOrderOnAThread) {
  downloads_.deliver_on_thread(true);
  for (const unsigned microseconds : {0u, 500u}) {
    delay(microseconds);
    delivered_.clear();
    for (uint32_t param = 0; param < 40; ++param) add(param);
    downloads_.finish();
    EXPECT_EQ(delivered_, all_of(40));
  }
}

TEST_F(GradientDownloadsTest, ThrowsWhatDeliveryThrewAndDeliversNoLaterGradient) {
  downloads_.deliver_on_thread(true);
  fails_at_ = 3;
  EXPECT_THROW(
      {
        for (uint32_t param = 0; param < 20; ++param) add(param);
        downloads_.finish();
      },
      std::runtime_error);
  EXPECT_EQ(delivered_, all_of(3));
  downloads_.drop();
  fails_at_ = -1;
  delivered_.clear();
  add(0);
  downloads_.finish();
  EXPECT_EQ(delivered_, all_of(1));
}

TEST_F(GradientDownloadsTest, DropsWhatIsInFlightWhileTheThreadDelivers) {
  downloads_.deliver_on_thread(true);
  for (const unsigned microseconds : {0u, 100u}) {
    delay(microseconds);
    for (int round = 0; round < 100; ++round) {
      add(0);
      add(1);
      downloads_.drop();
      const std::vector<uint32_t> before = delivered_;
      downloads_.finish();
      EXPECT_EQ(delivered_, before);
    }
  }
}

}  // namespace
}  // namespace zr::host
