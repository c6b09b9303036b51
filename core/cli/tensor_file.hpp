// Reads the parameters of a model from the headers of safetensors files.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.hpp"

namespace zr::host::cli {

/// The model that safetensors files describe.
struct TensorFile {
  std::vector<plan::Parameter> parameters;
  zr_dtype dtype = ZR_NONE;  // the dtype of all parameters, if it is the same fp32, bf16 or fp16 for all
};
/// Returns the floating-point tensors in the order of the files, without reading their data. Throws UserError for a
/// file that checkpoint.init also rejects (checkpoint/safetensors.hpp), and for a tensor that is in two files.
TensorFile read_safetensors(const std::vector<std::string>& files);

}  // namespace zr::host::cli
