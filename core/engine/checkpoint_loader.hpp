// Loading a checkpoint: what it has for this model, and every rank's parts of it.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/load.hpp"
#include "config/config.hpp"
#include "engine/model_buffers.hpp"
#include "engine/refresh_state.hpp"
#include "engine/sharded_state.hpp"
#include "engine/step_context.hpp"

namespace zr::host {

struct LoadOptions {
  bool weights_only = false;      // no optimizer state, no step: training begins with these weights
  bool strict = true;             // false: what is missing, unexpected or of another shape is told and left as it is
  bool convert = false;           // weights of another type are rounded from the fp32 master
  bool fallback = false;          // one that is damaged is passed over for the one before it, with a warning
  std::vector<Rename> renames{};  // of weights, in files of other programs
};
/// Tensors by role and name.
struct LoadReport {
  std::string folder;
  std::vector<std::string> missing, unexpected, other_shape;
  std::vector<std::string> fresh, dropped;  // optimizer states that begin anew; that only the saved one had
};

/// Throws Failure(user) for a rename that matches no weight of the model: a mistake in its name.
void check_renames(const std::vector<Rename>& renames, const std::vector<Parameter>& parameters,
                   const std::vector<ModelBuffer>& buffers);
/// "; missing: weight 'a', state.exp_avg 'b' and 3 more"; "" for no names.
std::string list_of(const std::string& what, const std::vector<std::string>& names);

/// One checkpoint, matched with the tensors of the model. Training thread; communicates nothing.
class CheckpointLoader {
 public:
  struct Parts {
    ShardedState& state;
    ModelBuffers& buffers;
  };
  /// Refers to all. change: how the model differs from the one that was saved a moment ago; null: it does not.
  CheckpointLoader(const StepContext& context, const Parts& parts, const Checkpoint& from, const LoadOptions& how,
                   const ParameterChange* change);

  /// The checkpoint's optimizer is this job's, and its states are wanted.
  bool has_same_optimizer() const { return same_optimizer_; }
  /// Throws Failure(user) where the checkpoint does not fit model or optimizer.
  void check() const;
  /// Reads this rank's parts of all tensors. May leave some of them read if it throws.
  void read();
  /// Calls fn for every parameter whose weight was found, with its name in the checkpoint.
  void each_weight(const std::function<void(uint32_t param, const std::string& saved)>& fn) const;
  /// Parameters of which an optimizer state was not found.
  const std::set<uint32_t>& fresh_params() const { return fresh_params_; }
  /// What was not found, and what was not wanted.
  LoadReport report() const;

 private:
  static constexpr uint32_t kNoParam = ~0u;
  struct Part {
    uint32_t param;     // kNoParam: a buffer
    TensorInfo tensor;  // as it is here
    const SavedTensor* saved;
  };
  void match();
  const SavedTensor* saved_for(uint32_t param, const TensorInfo& tensor) const;
  void read_part(const Part& part, int64_t first, int64_t count, void* to) const;
  void read_buffer(const Part& part, const ModelBuffer& buffer);

  const StepContext& context_;
  const Parts parts_of_;
  const Checkpoint& from_;
  const LoadOptions how_;
  const ParameterChange* const change_;
  const bool same_optimizer_;
  std::vector<Part> parts_;
  LoadReport report_;
  std::set<uint32_t> fresh_params_;
};

}  // namespace zr::host
