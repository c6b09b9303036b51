// The contents of a checkpoint that are not tensors: training progress (docs/checkpoint-format.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/limits.hpp"
#include "checkpoint/json_field.hpp"

namespace zr::host::checkpoint {

/// The largest number of samples of a run.
inline constexpr int64_t kMaxSamples = kMaxSteps * kMaxSteps;

struct CheckpointMetadata {
  int64_t updates = 0;  // number of optimizer updates; a skipped step makes no update
  int64_t samples = 0;  // number of samples that all ranks have read
  int64_t seed = 0;
  std::map<std::string, int64_t> parameter_steps;
  std::map<std::string, int64_t> parameter_local_steps;  // those of them with local gradients, if there are any
  struct {
    double value = 1;
    int64_t good = 0, hysteresis_left = 1, skips = 0;
    bool dynamic = false;
  } loss_scale;
  /// The last step updated the weights; false: it was skipped because gradients were not finite.
  bool last_step_applied = true;
  std::string optimizer;
  std::vector<std::string> slots;              // the optimizer's states
  std::map<std::string, std::string> globals;  // the optimizer's global values, as bytes
  /// The steps of the job's other engines at the time of the save, by name.
  std::map<std::string, int64_t> engines;
  /// For people: world size, strategy and configuration of the job that saved it.
  int64_t world = 1;
  std::string strategy, config;
};

/// Returns a JSON object.
std::string to_text(const CheckpointMetadata& metadata);
/// Parses the metadata of a checkpoint of this step. Throws UserError naming file and key if a
/// value is missing, has a wrong type, or is out of bounds.
CheckpointMetadata parse_metadata(const JsonField& root, int64_t step);

}  // namespace zr::host::checkpoint
