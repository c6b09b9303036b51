// What a checkpoint holds apart from tensors: how far training has come (FORMAT.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/json_field.hpp"

namespace zr::host {

/// The most steps that train.steps allows.
inline constexpr int64_t kMaxSteps = 2147483647;
inline constexpr int64_t kMaxSamples = kMaxSteps * kMaxSteps;  // train.global_batch is bounded as steps are

struct CheckpointMetadata {
  int64_t updates = 0;  // optimizer updates; steps that were skipped made none
  int64_t samples = 0;  // read by all ranks
  int64_t seed = 0;
  std::map<std::string, int64_t> parameter_steps;
  struct {
    double value = 1;
    int64_t good = 0, hysteresis_left = 1, skips = 0;
    bool dynamic = false;
  } loss_scale;
  /// The last step updated the weights; false: it was skipped because gradients were not finite.
  bool last_step_applied = true;
  std::string optimizer;
  std::vector<std::string> slots;              // the optimizer's states
  std::map<std::string, std::string> globals;  // of the optimizer, as bytes
  /// Steps of the job's other engines when this one was saved, by name.
  std::map<std::string, int64_t> engines;
  /// For people: ranks, strategy and configuration of the job that saved it.
  int64_t world = 1;
  std::string strategy, config;
};

/// A JSON object.
std::string to_text(const CheckpointMetadata& facts);
/// Of a checkpoint of that step and format version. Throws Failure(user) naming file and key where a value is missing,
/// of another type or out of bounds.
CheckpointMetadata parse_metadata(const JsonField& facts, int64_t step, int64_t version);

}  // namespace zr::host
