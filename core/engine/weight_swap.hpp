// Other values in the place of the model's weights for a while, such as averages of earlier weights (zr::Swap).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/training_parts.hpp"
#include "job/step_context.hpp"

namespace zr::host::engine {

/// Masters and optimizer states are not touched: end() restores the weights bit for bit, and with them the state of
/// training. The weights are saved in host memory, in their dtype: each rank saves the parts that it writes, which the
/// ledger counts (kind `snapshot`, tag `zr::Swap`). Training thread only.
class WeightSwap {
 public:
  /// Keeps references to the context and to all parts.
  WeightSwap(const job::StepContext& context, const TrainingParts& parts);
  WeightSwap(const WeightSwap&) = delete;

  /// Returns the full fp32 values of a parameter, valid until its next call; null: the parameter keeps its values. The
  /// same on all ranks. May throw.
  using Values = std::function<const float*(uint32_t param)>;
  /// Saves the weights and replaces them, rounded to their dtype. If `values` throws on a rank, the weights are
  /// restored and all ranks throw. Collective.
  void begin(const Values& values);
  /// Restores the weights. What the program wrote to them since begin() is lost. Collective.
  void end();
  /// Call instead of end() if an exception ends the scope: a single rank restores its weights, others keep the values.
  void abandon();
  bool active() const { return state_ == State::active; }
  /// True after abandon(), if the weights are not restored. A load replaces them; then call forget().
  bool abandoned() const { return state_ == State::abandoned; }
  void forget();

 private:
  enum class State { none, active, abandoned };
  void save();
  void restore();
  // Replaces the parts of one parameter. Fails on all ranks if the values differ between them.
  void replace(uint32_t param, const Values& values);
  void publish();

  const job::StepContext& context_;
  const TrainingParts parts_;
  std::vector<std::vector<char>> saved_;  // by parameter
  std::vector<uint32_t> replaced_;        // parameters with other values
  int64_t saved_bytes_ = 0;
  State state_ = State::none;
};

}  // namespace zr::host::engine
