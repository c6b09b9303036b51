// Unsharded tensors by name, under every strategy: engine.get(), set(), buffer(), set_buffer() and weights_hash().
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "engine/training_parts.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// Training thread only; all methods but find() are collective.
class TensorAccess {
 public:
  /// Keeps references to the context and to all parts.
  TensorAccess(const job::StepContext& context, const TrainingParts& parts);
  TensorAccess(const TensorAccess&) = delete;

  /// A parameter's index by name or alias; throws UserError with the nearest name.
  uint32_t find(const std::string& parameter) const;
  /// Writes the full tensor as fp32 to out[count]. `slot` names an optimizer state.
  void read(uint32_t param, state::LogicalTensor kind, const std::string& slot, float* out);
  /// Sets the full tensor. The values must be equal on all ranks.
  void write(uint32_t param, state::LogicalTensor kind, const std::string& slot, const float* values);
  /// XXH3 (64 bits) of all parameters' names and fp32 values, in name order, as 16 hex digits.
  std::string weights_hash();
  /// The bytes that train.buffers selects for a buffer.
  std::string buffer(const std::string& name);
  /// Sets a buffer. The bytes must be equal on all ranks.
  void set_buffer(const std::string& name, const std::string& bytes);

 private:
  std::size_t find_buffer(const std::string& name);
  // Throws UserError on all ranks if the values that the ranks pass to engine.set() differ.
  void check_same_values(const plan::Parameter& parameter, const float* values);

  const job::StepContext& context_;
  const TrainingParts parts_;
  std::unordered_map<std::string, uint32_t> index_;  // of parameters, by name and alias
};

}  // namespace zr::host::engine
