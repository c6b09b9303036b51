// Reports parameters and buffers whose element type differs from train.dtype.
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
/// Logs one line on rank 0 that names the floating-point buffers that are not of a 16-bit train.dtype and keep their
/// types. Throws UserError, on all ranks, for a pattern of train.cast_buffers, other than "*", that
/// matches no floating-point buffer.
void check_buffer_types(const std::vector<std::pair<std::string, torch::Tensor>>& buffers,
                        const config::JobConfig& config, int rank);

}  // namespace zr::host::model
