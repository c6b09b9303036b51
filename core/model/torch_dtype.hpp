// Element types of libtorch and their names in safetensors files. core/checkpoint has the sizes by name, and the types
// that Zeroth computes with, but does not include libtorch.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

#include "zr/abi/base.h"

namespace zr::host::model {

/// The type of weights. InternalError unless `dtype` is ZR_F32, ZR_BF16 or ZR_F16. Any thread.
at::ScalarType torch_type(zr_dtype dtype);
/// The name in safetensors files, "F32"; libtorch's own name if these files do not have the type. Any thread.
std::string safetensors_name(at::ScalarType type);
/// The type that has this name in safetensors files. InternalError for an unknown name. Any thread.
at::ScalarType torch_type_named(std::string_view name);

/// The name of a type in messages: that of train.dtype ("fp32"), or else that of C++ ("double").
std::string type_name(at::ScalarType type);

}  // namespace zr::host::model
