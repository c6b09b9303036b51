// The dtypes of safetensors files: sizes, names, and which of them weights can have.
#include <gtest/gtest.h>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host {
namespace {

TEST(SafetensorsDtypeTest, HasNameAndSizeOfEveryDtypeOfTheAbi) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16, ZR_F64, ZR_I8, ZR_U8, ZR_I32, ZR_I64})
    EXPECT_EQ(checkpoint::stored_size(checkpoint::safetensors_name(dtype)), size_of(dtype)) << name_of(dtype);
  EXPECT_EQ(checkpoint::safetensors_name(ZR_BF16), "BF16");
  EXPECT_THROW(checkpoint::safetensors_name(ZR_NONE), InternalError);
}

TEST(SafetensorsDtypeTest, HasSizesOfDtypesThatAreOnlyCopied) {
  EXPECT_EQ(checkpoint::stored_size("BOOL"), 1);
  EXPECT_EQ(checkpoint::stored_size("F8_E4M3"), 1);
  EXPECT_EQ(checkpoint::stored_size("I16"), 2);
  EXPECT_EQ(checkpoint::stored_size("U32"), 4);
  EXPECT_EQ(checkpoint::stored_size("C64"), 8);
  EXPECT_EQ(checkpoint::stored_size("F4"), 0);
  EXPECT_EQ(checkpoint::stored_size(""), 0);
}

TEST(SafetensorsDtypeTest, NamesTheDtypesOfWeights) {
  EXPECT_EQ(checkpoint::safetensors_float("F32"), ZR_F32);
  EXPECT_EQ(checkpoint::safetensors_float("BF16"), ZR_BF16);
  EXPECT_EQ(checkpoint::safetensors_float("F16"), ZR_F16);
  EXPECT_EQ(checkpoint::safetensors_float("F64"), ZR_NONE);
  EXPECT_EQ(checkpoint::safetensors_float("I32"), ZR_NONE);
  EXPECT_EQ(checkpoint::safetensors_float("F4"), ZR_NONE);
}

}  // namespace
}  // namespace zr::host
