// The dtypes of weights, gradients and communication.
#include "config/precision.hpp"

#include <gtest/gtest.h>

#include "base/dtype.hpp"
#include "config/config.hpp"

namespace {

using namespace zr::host;

config::Precision of(const std::vector<std::string>& overrides) {
  return config::Document::parse("", "job.toml", overrides).check({}, 1).precision();
}

TEST(PrecisionTest, CommunicatesGradientsInTheWeightTypeAndReducesInFp32) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
    const config::Precision types = of({"train.dtype=" + std::string(name_of(dtype))});
    EXPECT_EQ(types.weights, dtype);
    EXPECT_EQ(types.gradients, dtype);
    EXPECT_EQ(types.reduced_gradients, ZR_F32);
  }
}

TEST(PrecisionTest, CommunicatesInReduceDtype) {
  const config::Precision types = of({"gradients.reduce_dtype=bf16"});
  EXPECT_EQ(types.weights, ZR_F32);
  EXPECT_EQ(types.gradients, ZR_BF16);
  EXPECT_EQ(types.reduced_gradients, ZR_F32);
}

TEST(PrecisionTest, Reduces16BitGradientsInTheirType) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    const config::Precision types = of({"gradients.dtype=bf16", std::string("train.dtype=") + dtype});
    EXPECT_EQ(types.gradients, ZR_BF16) << dtype;
    EXPECT_EQ(types.reduced_gradients, ZR_BF16) << dtype;
  }
}

}  // namespace
