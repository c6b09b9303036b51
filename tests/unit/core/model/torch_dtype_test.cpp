// The element types of libtorch by their names in safetensors files, against the table of core/checkpoint.
#include "model/torch_dtype.hpp"

#include <gtest/gtest.h>

#include "checkpoint/safetensors.hpp"
#include "zr/error.hpp"

namespace zr::host {

TEST(TorchDtypeTest, HasEveryTypeOfSafetensorsFilesWithItsSize) {
  for (const char* name : {"F32", "BF16", "F16", "F64", "I8", "U8", "I32", "I64", "BOOL", "F8_E5M2", "F8_E4M3", "I16",
                           "U16", "U32", "U64", "C64"}) {
    const at::ScalarType type = model::torch_type_named(name);
    EXPECT_EQ(checkpoint::stored_size(name), static_cast<int64_t>(at::elementSize(type))) << name;
    EXPECT_EQ(model::safetensors_name(type), name);
  }
}

TEST(TorchDtypeTest, NamesATypeThatFilesDoNotHaveAsLibtorchDoes) {
  EXPECT_EQ(model::safetensors_name(at::kComplexDouble), "ComplexDouble");
  EXPECT_EQ(checkpoint::stored_size("ComplexDouble"), 0);
}

TEST(TorchDtypeTest, RejectsAnUnknownName) { EXPECT_THROW(model::torch_type_named("F4"), InternalError); }

}  // namespace zr::host
