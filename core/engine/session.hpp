// One model in training: owns the parts of an engine, and calls them in the order of a step. Without libtorch;
// zr::Engine is its public interface.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "engine/activation_offload.hpp"
#include "engine/checkpointer.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/memory_budget.hpp"
#include "engine/model_buffers.hpp"
#include "engine/model_refresh.hpp"
#include "engine/optimizer_update.hpp"
#include "engine/planned_job.hpp"
#include "engine/refresh_state.hpp"
#include "engine/run_recorder.hpp"
#include "engine/setup.hpp"
#include "engine/sharded_state.hpp"
#include "engine/skip_log.hpp"
#include "engine/step_recorder.hpp"
#include "engine/step_sync.hpp"
#include "engine/stop_signal.hpp"
#include "engine/tensor_access.hpp"
#include "engine/training_parts.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_flow.hpp"
#include "engine/weight_monitor.hpp"

namespace zr::host {

/// Training thread only. Collective methods are called by all ranks alike.
class Session {
 public:
  /// Collective: compares the ranks' set-ups, plans, allocates, takes rank 0's parameters and buffers. `model` outlives
  /// it. Nothing is written to the run folder before all of that succeeded.
  /// `before`, if any: of the session that trained the model with another list of parameters; its state is loaded
  /// instead of what [checkpoint] resume and init ask for.
  Session(Setup setup, Model& model, std::unique_ptr<RefreshState> before = nullptr);
  ~Session();
  Session(const Session&) = delete;

  /// Around autograd's run over one micro-batch.
  void begin_backward(double loss, double weight);
  void end_backward();  // see above
  /// Instead of end_backward() when an exception ended it. If no gradient was handed over yet, it is as if it had not
  /// begun.
  void fail_backward();
  /// On the accumulation boundary: agree, clip, update, gather; true then. Collective.
  bool step();

  /// Whatever the strategy, compares between the ranks that all are in `call` ("engine.get(\"w\")"). Collective.
  void meet(const std::string& call) { job_.comm.barrier(call.c_str()); }
  /// Prepares the model for the end of this session: afterwards its parameters have memory of their own with the
  /// present values in that dtype, fp32 or the weights', and so do floating-point buffers. On a failure, which is
  /// thrown on all ranks, all is as before. Collective, between steps.
  void return_weights(zr_dtype dtype);
  /// Saves the state for the session that continues. Afterwards this one can only be destroyed. A failure changes
  /// nothing. Collective.
  RefreshState hand_over(ParameterChange change);
  /// Weights hash and wire counts for summary.json; implied by the last step. Collective.
  void finish();
  double mean(double value);     // over ranks, in rank order. Collective.
  void validation(double loss);  // a row of metrics.jsonl; the same loss on all ranks
  void evaluation(bool begins);  // told to the strategy. Collective.
  /// The model's buffers get this rank's own values back, when the outermost evaluation ends in any way.
  void end_evaluation_buffers() noexcept { buffers_.end_evaluation(); }

  int rank() const { return job_.rank(); }
  int world() const { return job_.world(); }
  int threads() const { return job_.pool.width(); }
  int64_t micro_index() const;
  const JobConfig& config() const { return job_.config(); }
  const MemoryPlan& plan() const { return job_.plan; }

  TrainingProgress& progress() { return progress_; }
  Checkpointer& checkpointer() { return checkpointer_; }
  TensorAccess& tensors() { return tensors_; }
  ModelRefresh& refresh() { return refresh_; }
  WeightFlow& weights() { return weights_; }
  CommRuntime& communicator() { return job_.comm; }
  const Tiers& tiers() const { return state_.tiers(); }

 private:
  TrainingParts parts();
  void accept();
  GlobalStats agree_on_step();
  void update_weights(const GlobalStats& global, double rate, double norm);
  void finish_step(const GlobalStats& global, double rate);
  void write_totals() { step_recorder_.record_totals(tensors_.weights_hash()); }
  void write_summary();
  void check_tiers() const;
  // Forget the micro-steps of the coming step, whose micro-batches weigh nothing, or gave no gradient; and say so,
  // alike on all ranks.
  [[noreturn]] void abandon_step(const GlobalStats& global);
  [[noreturn]] void reject_step();

  // In the order of construction; destroyed from the last to the first.
  PlannedJob job_;
  std::shared_ptr<RunRecorder> recorder_;    // null once another session continues it
  std::shared_ptr<StopSignal> stop_signal_;  // null: signals end the process
  TrainingProgress progress_;
  ModelBuffers buffers_;
  MemoryBudget budget_;
  ShardedState state_;
  WeightFlow weights_;
  WeightMonitor monitor_;
  StepSync step_sync_;
  GradientFlow gradients_;
  OptimizerUpdate update_;
  StepRecorder step_recorder_;
  SkipLog skips_;
  Checkpointer checkpointer_;
  TensorAccess tensors_;
  ModelRefresh refresh_;
  std::optional<ActivationOffload> activations_;       // none: saved tensors stay on the device
  const int exceptions_ = std::uncaught_exceptions();  // under way when this began: not this job's
};

}  // namespace zr::host
