// The keys about precision: dtypes of weights and gradients, and the loss scale.
#pragma once

#include <string>
#include <vector>

#include "config/host_config.hpp"

namespace zr::host::config {

/// The dtypes that follow from these tables.
Precision precision_of(const TrainConfig& train, const GradientsConfig& gradients);

/// A key that contradicts another one, or must be a power of two.
struct PrecisionProblem {
  Origin origin;     // of the key
  std::string text;  // "key: problem"
};
/// All of them.
std::vector<PrecisionProblem> precision_problems(const HostConfig& config);

}  // namespace zr::host::config
