// The model that safetensors files describe, for commands that plan.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.hpp"

namespace zr::host {

/// What safetensors files hold.
struct TensorFile {
  std::vector<Parameter> parameters;
  zr_dtype dtype = ZR_NONE;  // of all of them, if they share one of fp32, bf16, fp16
};
/// The floating-point tensors, in the files' order; their data are not read. Throws Failure(user) naming file and
/// remedy, for every file that checkpoint.init rejects too (checkpoint/safetensors.hpp), and for a tensor that two
/// files have.
TensorFile read_safetensors(const std::vector<std::string>& files);

}  // namespace zr::host
