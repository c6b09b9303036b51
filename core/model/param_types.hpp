// Parameters whose element type is not the one that they are trained in.
#pragma once

#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "config/config.hpp"

namespace zr::host {

/// Reports parameters that are neither fp32 nor of train.dtype in one log line, on rank 0; with
/// `train.param_dtype = "reject"` throws Failure(user) instead, on all ranks.
void check_param_types(const std::vector<std::pair<std::string, torch::Tensor>>& parameters, const JobConfig& config,
                       int rank);

}  // namespace zr::host
