// Loads a checkpoint: matches its tensors with the model's, and reads this rank's parts.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/load.hpp"
#include "config/config.hpp"
#include "engine/model_buffers.hpp"
#include "engine/refresh_state.hpp"
#include "job/step_context.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

struct CheckpointLoadOptions {
  bool weights_only = false;  // loads no optimizer states and no step: training starts from these weights
  bool strict = true;         // false: missing, unexpected or differently shaped tensors are reported, not loaded
  bool convert = false;       // weights of another dtype are converted from the fp32 master
  bool fallback = false;      // a damaged checkpoint is replaced by the one before it, with a warning
  std::vector<config::Rename> renames{};  // names of weights in files of other programs
  std::string name{};                     // of the checkpoint in messages, if it is a converted file; "": its path
  /// Writes the values of the tensors with these names in the file, which fits the model. Called on all ranks after the
  /// file is opened and checked, and before values are read; may throw on all ranks. Null: the file has its values.
  std::function<void(const std::vector<std::string>& names)> provide_values{};
};
/// The result of a load. Each list contains tensors as text: "weight 'a'".
struct CheckpointLoadReport {
  std::string folder;
  std::vector<std::string> missing, unexpected, other_shape;
  /// Optimizer states that start at zero, and saved states that are not loaded. A parameter whose optimizer has changed
  /// has its states in both lists.
  std::vector<std::string> fresh, dropped;
  /// Buffers that are saved in a narrower type than the model has them in: "'a' (BF16)".
  std::vector<std::string> rounded_buffers{};
};

/// Throws UserError for a rename that matches no weight or buffer of the model.
void check_renames(const std::vector<config::Rename>& renames, const std::vector<plan::Parameter>& parameters,
                   const std::vector<model::ModelBuffer>& buffers);
/// "; missing: weight 'a', state.exp_avg 'b' and 3 more"; "" for no names.
std::string list_of(const std::string& what, const std::vector<std::string>& names);
/// Logs which buffers of the checkpoint `folder` were saved in a narrower type ("'a' (BF16)"); nothing for no names.
void warn_of_rounded_buffers(const std::string& folder, const std::vector<std::string>& names);

/// One checkpoint, matched with the tensors of the model. Training thread; does not communicate.
class CheckpointLoader {
 public:
  struct Parts {
    state::ShardedState& state;
    ModelBuffers& buffers;
  };
  /// Keeps references to all arguments. change: how engine.refresh() changed the model since `from` was saved; null:
  /// not a refresh.
  CheckpointLoader(const job::StepContext& context, const Parts& parts, const checkpoint::Checkpoint& from,
                   const CheckpointLoadOptions& options, const ParameterChange* change);

  /// Whether the optimizer that updates a parameter is the one that updated it when the checkpoint was saved, and its
  /// states are to be loaded.
  bool has_same_optimizer(uint32_t param) const;
  /// Throws UserError if the checkpoint does not fit the model or the optimizer.
  void check() const;
  /// The names in the file of all tensors that read() or compare_repeated() reads.
  std::vector<std::string> names_to_read() const;
  /// Whether weights of another program have a tied parameter under more than one of its names.
  bool has_repeated() const { return !repeated_.empty(); }
  /// Compares the values of these names, which must be equal: one of them is loaded. If they differ, throws UserError,
  /// or, if the load is not strict, reports the other name as unexpected.
  void compare_repeated();
  /// Reads this rank's parts of all tensors. If it throws, some of them may have been read.
  void read();
  /// Calls fn for every parameter whose weight was found, with its name in the checkpoint.
  void for_each_weight(const std::function<void(uint32_t param, const std::string& saved)>& fn) const;
  /// Parameters with an optimizer state that was not found.
  const std::set<uint32_t>& fresh_params() const { return fresh_params_; }
  /// Tensors that were not found, and tensors that were not loaded.
  CheckpointLoadReport report() const;

 private:
  static constexpr uint32_t kNoParam = ~0u;
  struct MatchedTensor {
    uint32_t param;                 // kNoParam: a buffer
    checkpoint::TensorInfo tensor;  // the model's tensor
    const checkpoint::SavedTensor* saved;
    plan::StateShape shape;
  };
  // A tied parameter's tensor under another name than the one that is loaded.
  struct Repeated {
    const checkpoint::SavedTensor *loaded, *other;
  };
  void match();
  void restart_fresh_params();
  void check_dtypes() const;
  std::string dtype_remedy(const MatchedTensor& part) const;
  std::vector<std::string> rounded_buffers() const;
  void match_empty_buffers(std::set<const checkpoint::SavedTensor*>& matched);
  void match_repeated(std::set<const checkpoint::SavedTensor*>& matched);
  bool equal(const checkpoint::SavedTensor& a, const checkpoint::SavedTensor& b) const;
  void find_weights();
  const checkpoint::SavedTensor* saved_state(uint32_t param, const checkpoint::TensorInfo& tensor) const;
  void report_other_shape(uint32_t param, const checkpoint::TensorInfo& tensor);
  const checkpoint::SavedTensor* match_tensor(uint32_t param, const checkpoint::TensorInfo& tensor,
                                              const plan::StateShape& shape);
  void report_unmatched_state(const checkpoint::SavedTensor& saved);
  void report_unmatched(const std::set<const checkpoint::SavedTensor*>& matched);
  const checkpoint::SavedTensor* saved_for(uint32_t param, const checkpoint::TensorInfo& tensor) const;
  void read_part(const MatchedTensor& part, int64_t first, int64_t count, void* to) const;
  void read_buffer(const MatchedTensor& part, const model::ModelBuffer& buffer);

  const job::StepContext& context_;
  const Parts parts_of_;
  const checkpoint::Checkpoint& from_;
  const CheckpointLoadOptions options_;
  const ParameterChange* const change_;
  const bool same_optimizers_;  // the same list; for files that do not name the optimizer of each weight
  std::map<uint32_t, const checkpoint::SavedTensor*> weights_;  // by parameter
  std::unordered_map<std::string, uint32_t> params_;            // by the name in the checkpoint
  std::vector<MatchedTensor> parts_;
  std::vector<Repeated> repeated_;
  CheckpointLoadReport report_;
  /// Of the states in the report, those of parameters whose optimizer is the same.
  std::vector<std::string> missing_states_, unexpected_states_;
  std::set<uint32_t> fresh_params_;
};

}  // namespace zr::host::engine
