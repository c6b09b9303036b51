// Reports parameters whose element type differs from the type that they are trained in.
#pragma once

#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

#include "config/config.hpp"

namespace zr::host::model {

/// Logs one line on rank 0 that names the parameters that are neither fp32 nor of train.dtype; with
/// `train.param_dtype = "reject"` throws UserError instead, on all ranks.
void check_param_types(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                       const config::JobConfig& config, int rank);

}  // namespace zr::host::model
