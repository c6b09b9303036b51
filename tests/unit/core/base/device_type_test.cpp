// The numbers of types of devices, by the names that job.device has.
#include <gtest/gtest.h>

#include "base/device_memory.hpp"

namespace zr::host {
namespace {

TEST(DeviceTypeTest, IsDlpacksNumberOfTheName) {
  EXPECT_EQ(device_type_of("cuda"), int32_t{ZR_DEVICE_CUDA});
  EXPECT_EQ(device_type_of("cuda:1"), int32_t{ZR_DEVICE_CUDA});
  EXPECT_EQ(device_type_of("xpu"), 14);
  EXPECT_EQ(device_type_of("sim:0"), int32_t{ZR_DEVICE_EXTENSION});
  EXPECT_EQ(device_type_of("cudabackend"), int32_t{ZR_DEVICE_EXTENSION});
}

}  // namespace
}  // namespace zr::host
