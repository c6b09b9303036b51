// One model in training: owns the parts of an engine and calls them in the order of a step. It does not use libtorch.
// zr::Engine is its public interface.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "engine/activation_offload.hpp"
#include "engine/budget_limit.hpp"
#include "engine/checkpointer.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/model_buffers.hpp"
#include "engine/model_refresh.hpp"
#include "engine/optimizer_update.hpp"
#include "engine/refresh_state.hpp"
#include "engine/skip_log.hpp"
#include "engine/step_kind.hpp"
#include "engine/step_sync.hpp"
#include "engine/step_timer.hpp"
#include "engine/tensor_access.hpp"
#include "engine/training_parts.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_flow.hpp"
#include "engine/weight_monitor.hpp"
#include "engine/weight_swap.hpp"
#include "job/setup.hpp"
#include "job/started_job.hpp"
#include "run/run_log.hpp"
#include "run/stop_signal.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

/// Training thread only. All ranks call collective methods in the same order.
class Session {
 public:
  /// Compares the set-ups of the ranks, plans, allocates, and takes over rank 0's parameters and buffers. `model` must
  /// outlive the session. Writes to the run folder only after all of this succeeded. before: from the session that
  /// trained the model with another list of parameters; its state is loaded, and checkpoint.resume and checkpoint.init
  /// are ignored; null: there was none. Collective.
  Session(job::Setup setup, model::Model& model, std::unique_ptr<RefreshState> before = nullptr);
  ~Session();
  Session(const Session&) = delete;

  /// Call before autograd's backward over one micro-batch.
  void begin_backward(Loss loss, double weight);
  void end_backward();  // call after autograd's backward
  /// Call instead of end_backward() if an exception ended backward. Undoes the micro-step if the strategy has received
  /// no gradient yet.
  void fail_backward();
  /// After the last micro-step of a step: exchanges statistics, clips, updates, gathers, and returns true. Otherwise
  /// returns false. Collective.
  bool step();

  /// Sets the number of micro-steps of the steps that follow. Throws UserError within a step, or if the plan has no
  /// memory for sums over micro-batches.
  void set_accumulation(int accumulation);
  /// Prepares the model for the end of this session. After the session is destroyed, the model's parameters have their
  /// own memory, with the current values in `dtype` (fp32 or the dtype of the weights). Floating-point buffers are
  /// converted to `dtype`. A failure is thrown on all ranks and changes nothing. Collective, between steps.
  void return_weights(zr_dtype dtype);
  /// Saves the state for the next session. After success, only destroy this session. A failure changes nothing.
  /// Collective.
  RefreshState hand_over(ParameterChange change);
  /// Computes the weights hash and the communication volume for summary.json. The last step does this too. Collective.
  void finish();
  double mean(double value);     // over ranks, added in rank order; collective
  void validation(double loss);  // writes a row to metrics.jsonl; all ranks pass the same loss
  void evaluation(bool begins);  // begins or ends an evaluation, and reports it to the strategy; collective
  /// The job fails: call it before the destructor if no exception ends this session.
  void record_failure() { failed_ = true; }
  /// Restores this rank's own values of the model's buffers at the end of the outermost evaluation, also after an
  /// exception.
  void end_evaluation_buffers() noexcept { buffers_.end_evaluation(); }

  /// BudgetLimit::memory_in_use().
  MemoryInUse memory_in_use() const { return budget_.memory_in_use(); }

  int rank() const { return job_.rank(); }
  int world() const { return job_.world(); }
  int threads() const { return job_.pool.width(); }
  int64_t micro_index() const;
  uint64_t generator_seed(int64_t key) const;  // any thread
  const config::JobConfig& config() const { return job_.config(); }
  const plan::MemoryPlan& plan() const { return job_.plan; }

  TrainingProgress& progress() { return progress_; }
  Checkpointer& checkpointer() { return checkpointer_; }
  TensorAccess& tensors() { return tensors_; }
  ModelRefresh& refresh() { return refresh_; }
  WeightSwap& swap() { return swap_; }
  WeightFlow& weights() { return weights_; }
  OptimizerUpdate& update() { return update_; }
  comm::CommRuntime& comm() { return job_.comm; }
  const Ledger& ledger() const { return job_.ledger; }
  const offload::Tiers& tiers() const { return state_.tiers(); }

 private:
  TrainingParts parts();
  void complete_step(double rate);
  void accept();
  // If the program edits gradients: averages and edits them, and returns true.
  bool average_gradients();
  GlobalStats exchange_statistics();
  void update_weights(const GlobalStats& global, double rate, double norm);
  void finish_step(const GlobalStats& global, double rate);
  void write_totals() { step_timer_.record_totals(tensors_.weights_hash()); }
  void write_summary();
  // Drops the micro-steps of the current step: the next backward begins it again.
  void drop_step();
  // Drops the micro-steps of the current step and throws on all ranks, because no parameter got a gradient.
  [[noreturn]] void reject_step();

  // Declared in the order of construction.
  job::StartedJob job_;
  const std::shared_ptr<run::RunLog> recorder_;         // shared with the next session, see hand_over()
  const std::shared_ptr<run::StopSignal> stop_signal_;  // shared too
  TrainingProgress progress_;
  ModelBuffers buffers_;
  BudgetLimit budget_;
  state::ShardedState state_;
  WeightFlow weights_;
  std::optional<ActivationOffload> activations_;  // empty: saved tensors stay on the device
  StepTimer step_timer_;
  WeightMonitor monitor_;
  StepSync step_sync_;
  LocalGradients local_;
  GradientFlow gradients_;
  OptimizerUpdate update_;
  ReducedStep reduced_step_{update_, local_, step_sync_};
  LocalStep local_step_{local_, update_, job_.world()};
  StepKind* step_ = &reduced_step_;  // of the current step, or the last one
  SkipLog skips_;
  Checkpointer checkpointer_;
  TensorAccess tensors_;
  ModelRefresh refresh_;
  WeightSwap swap_;
  const int exceptions_ = std::uncaught_exceptions();  // in flight at construction; not caused by this job
  bool failed_ = false;
};

}  // namespace zr::host::engine
