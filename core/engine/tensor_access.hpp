// Tensors by name, unsharded, whatever the strategy: engine.get(), set(), buffer(), set_buffer() and weights_hash().
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "engine/step_context.hpp"
#include "engine/training_parts.hpp"

namespace zr::host {

/// Training thread only; all methods but find() are collective.
class TensorAccess {
 public:
  /// Refers to all of it.
  TensorAccess(const StepContext& context, const TrainingParts& parts);
  TensorAccess(const TensorAccess&) = delete;

  /// A parameter's index by name or alias; throws Failure(user) with the nearest name.
  uint32_t find(const std::string& parameter) const;
  /// Writes the full tensor, fp32, to out[count]. `slot` names an optimizer state.
  void read(uint32_t param, LogicalRole role, const std::string& slot, float* out);
  /// Sets the full tensor, on all ranks to the same values.
  void write(uint32_t param, LogicalRole role, const std::string& slot, const float* values);
  /// XXH3 of the fp32 values in name order, 16 hex digits.
  std::string weights_hash();
  /// The bytes that train.buffers declares for a buffer.
  std::string buffer(const std::string& name);
  /// Sets a buffer on all ranks to these bytes, which must be equal on all of them.
  void set_buffer(const std::string& name, const std::string& bytes);

 private:
  std::size_t find_buffer(const std::string& name);
  // Throws Failure(user) on all ranks, before anything changes, if the ranks' values for engine.set() differ.
  void check_same_values(const Parameter& parameter, const float* values);

  const StepContext& context_;
  const TrainingParts parts_;
  std::unordered_map<std::string, uint32_t> index_;  // of parameters, by name and alias
};

}  // namespace zr::host
