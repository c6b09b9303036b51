// One model in training: the rooms put together, and the step. Without libtorch; zr::Engine is its face.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/failure.hpp"
#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "base/trace.hpp"
#include "checkpoint/load.hpp"
#include "comm/comm_runtime.hpp"
#include "config/config.hpp"
#include "control/control.hpp"
#include "control/job_services.hpp"
#include "engine/budget.hpp"
#include "engine/by_param.hpp"
#include "engine/engine_name.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/loss_scale.hpp"
#include "engine/model_buffers.hpp"
#include "engine/refresh_state.hpp"
#include "engine/run_recorder.hpp"
#include "engine/safetensors_dtype.hpp"
#include "engine/saver.hpp"
#include "engine/step_sync.hpp"
#include "engine/stop_signal.hpp"
#include "engine/weight_digest.hpp"
#include "engine/weight_flow.hpp"
#include "engine/weight_samples.hpp"
#include "model/model.hpp"
#include "offload/activation_store.hpp"
#include "offload/disk_backed_buffers.hpp"
#include "offload/optimizer_states.hpp"
#include "offload/tier.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "update/update.hpp"

namespace zr::host {

/// What the configuration decided, before a model is known.
struct Setup : ResolvedJob {
  std::shared_ptr<Control> control;
  Revalidate revalidate;  // the same job with other keys: for what a job over its budget could change
};

enum class LogicalRole { value, gradient, state };

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
  void end_backward();
  /// Instead of end_backward() when an exception ended it. If no gradient was handed over yet, it is as if it had not
  /// begun.
  void fail_backward();
  /// Whatever the strategy, compares between the ranks that all are in `call` ("engine.get(\"w\")"). Collective.
  void meet(const std::string& call);
  /// Prepares the model for the end of this session: afterwards its parameters have memory of their own with the
  /// present values in that dtype, fp32 or the weights', and so do floating-point buffers. On a failure, which is
  /// thrown on all ranks, all is as before. Collective, between steps.
  void return_weights(zr_dtype dtype);
  /// On the accumulation boundary: agree, clip, update, gather; true then. Collective.
  bool step();

  int rank() const { return control_->rank(); }
  int world() const { return control_->world(); }
  int accumulation() const { return accumulation_; }
  int threads() const { return pool_.width(); }
  /// The next step() ends the step.
  bool at_boundary() const { return micro_ == accumulation_; }
  int64_t step_index() const { return step_; }
  int64_t micro_index() const { return int64_t{micro_} * world() + rank(); }
  const JobConfig& config() const { return setup_.config; }
  void add_tokens(int64_t tokens) { tokens_ += tokens; }
  double last_loss() const { return last_.loss; }
  double last_grad_norm() const { return last_.grad_norm; }
  /// What the losses of the coming step are multiplied by before backward.
  double loss_scale() const { return loss_scale_.value(); }

  /// A parameter's index by name or alias; throws Failure(user) with the nearest name.
  uint32_t find(const std::string& parameter) const;
  const MemoryPlan& plan() const { return plan_; }
  /// Writes the whole logical tensor, fp32, to out[count]; or sets it. `slot` names an optimizer state. Collective.
  void read(uint32_t param, LogicalRole role, const std::string& slot, float* out);
  /// The same of elements [first, first + count).
  void read(uint32_t param, LogicalRole role, const std::string& slot, int64_t first, int64_t count, float* out);
  void write(uint32_t param, LogicalRole role, const std::string& slot, const float* values);
  /// XXH3 of the fp32 values in name order, 16 hex digits. Collective.
  std::string weights_hash();
  /// Weights hash and wire counts for summary.json; implied by the last step. Collective.
  void finish();
  /// Writes a checkpoint of the present step into `root`, keeps the newest `keep` there (0: all), and returns its
  /// folder. Between steps only. A failure on any rank is thrown on all, and training may go on. `aside`: returns when
  /// this rank's part is copied; a failure is thrown by the next step, save or load. Waits for the one before.
  /// Collective.
  std::string save(const std::string& root, int64_t keep, bool async);
  /// A checkpoint, the newest in a folder of them, or safetensors files of another program. A failure before its bytes
  /// are used leaves all as it was; in a model that was not trained yet it leaves no weights, and another load must
  /// follow. Collective.
  LoadReport load(const std::string& path, const LoadOptions& how);
  /// checkpoint.dir, and below it the engine's name if it has one; "" if there is no such folder.
  std::string checkpoint_dir() const;
  /// What [checkpoint] resume and init ask for. Collective.
  void begin();
  /// A signal asked for the end (checkpoint.on_signal), and a checkpoint of this step was written.
  bool stopped() const { return stopped_; }
  bool done() const { return stopped_ || step_ >= config().integer("train.steps"); }
  double mean(double value);     // over ranks, in rank order. Collective.
  void validation(double loss);  // a row of metrics.jsonl; the same loss on all ranks
  void evaluation(bool begins);  // told to the strategy. Collective.
  /// Checks that training can continue with the parameters that `look` finds, and that all ranks want it. False if
  /// nothing changed on any rank. A failure on any rank, of `look` too, is thrown on all, before anything changes.
  /// Collective.
  bool agree_on_change(const std::function<std::vector<Parameter>(ParameterChange&)>& look, ParameterChange& change);
  /// Saves the state for the session that continues. Afterwards this one can only be destroyed. A failure changes
  /// nothing. Collective.
  RefreshState hand_over(ParameterChange change);
  /// The model's buffers get this rank's own values back, when the outermost evaluation ends in any way.
  void end_evaluation_buffers() noexcept { model_buffers_.end_evaluation(); }
  /// The bytes that train.buffers declares for a buffer. Collective.
  std::string buffer(const std::string& name);
  /// Sets a buffer on all ranks to these bytes, which must be equal on all of them. Collective.
  void set_buffer(const std::string& name, const std::string& bytes);
  /// Where parameters that are not whole on this rank come from.
  WeightFlow& weights() { return *weight_flow_; }

  const Tiers& tiers() const { return tiers_; }
  const Ledger& ledger() const { return ledger_; }
  CommRuntime& communicator() { return *comm_; }

 private:
  void lap(Phase phase);  // adds the time since the last mark to it
  void restart_clock();   // what was done since the last mark belongs to no step
  void check_budget() const;
  void watch_budget();
  /// Throws, with what is held and what could be changed: libtorch, or the ledger, asked for more than the budget has.
  [[noreturn]] void over_budget(int64_t requested) const;
  std::vector<Suggestion> suggestions(const BudgetShortfall& over) const;
  void check_strategy() const;
  void check_optimizer();
  void compare_ranks();
  void allocate();
  void take_rank_zero();
  void accept();
  /// What `work`, which communicates nothing, throws on one rank is an error on all. Collective.
  void prepare_change(const std::function<void()>& work);
  void continue_from(const RefreshState& before);
  bool reaches(const GlobalStats& global) const;
  [[noreturn]] void reject_step();
  Overlap overlap() const;
  void release();
  void reseed();
  void keep_activations();
  void make_slices(const std::vector<zr_view>& views);
  void update_weights(const UpdateInput& input);
  /// Of OptimizerStates: fp32 masters, or the optimizer's slot of that index.
  std::size_t master_array() const { return 0; }
  std::size_t slot_array(std::size_t slot) const { return slot + (plan_.has_master ? 1 : 0); }
  /// OptimizerStates::visit() over a slice's elements [first, first + count) of its parameter; fn has them likewise.
  void visit(const UpdateSlice& slice, std::size_t array, int64_t first, int64_t count, OptimizerStates::Access use,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn);
  /// Calls fn over the elements of a view of this rank's weights or sums, wherever they stand.
  void reach(const zr_view& view, OptimizerStates::Access use, uint32_t param,
             const std::function<void(void* memory, int64_t first, int64_t count)>& fn);
  void call(zr_code code, const zr_error& error, const std::string& who);
  /// Collective. Throws Failure(user) on all ranks, before anything changes, if the ranks' values for engine.set()
  /// differ.
  void check_same_values(const Parameter& parameter, const float* values);
  /// Writes fp32 values into this rank's master and weight pieces of a parameter.
  void store(uint32_t param, const float* values);
  /// Calls fn(first, count, memory) for what this rank writes of a parameter's weights, part by part.
  void own_weights(uint32_t param, const std::function<void(int64_t first, int64_t count, void* memory)>& fn);
  /// The same as store() from a whole parameter in the weights' dtype.
  void store_full(uint32_t param, const void* full);
  /// Masters under weights that the program wrote to in place.
  void take_written();
  void report_written(uint32_t param);
  /// A write that the last checkpoint, saved in step(), does not have, is logged once.
  void report_unsaved(uint32_t param);
  uint64_t hash_of_weights(const UpdateSlice& slice);
  void check_backward() const;
  void check_gradients(const std::string& parameter) const;
  void compare_weights();
  struct Match {
    struct Part {
      uint32_t param;     // kNoParam: a buffer
      TensorInfo tensor;  // as it is here
      const SavedTensor* saved;
    };
    std::vector<Part> parts;
    std::vector<std::string> missing, unexpected, other_shape;
    std::vector<std::string> fresh, dropped;  // states that only this optimizer has, only the saved one had
    std::set<uint32_t> fresh_params;
  };
  static constexpr uint32_t kNoParam = ~0u;
  std::size_t find_buffer(const std::string& name);
  const SavedTensor* saved_for(const Checkpoint& from, uint32_t param, const TensorInfo& tensor,
                               const std::vector<Rename>& renames) const;
  Match match(const Checkpoint& from, const LoadOptions& how, bool same_optimizer) const;
  void check_match(const Checkpoint& from, const Match& found, const LoadOptions& how, bool same_optimizer) const;
  std::vector<std::string> candidates(const std::string& path, bool fallback);
  Checkpoint open(const std::string& path, const LoadOptions& how);
  void read_part(const Checkpoint& from, const Match::Part& part, int64_t first, int64_t count, void* to) const;
  void read_buffer(const Checkpoint& from, const Match::Part& part, const ModelBuffer& buffer, bool weights_only);
  void read_all(const Checkpoint& from, const Match& found, bool weights_only);
  void take_facts(const Checkpoint& from, const Match& found, const CheckpointMetadata& facts);
  void clear_states(uint32_t param);
  void tell(const LoadReport& report, int64_t step, const std::string& optimizer) const;
  const char* memory_of(uint32_t param, const std::string& role, int64_t first, int64_t count);
  /// read() of a tensor whose memory holds everything that was written.
  void read_settled(uint32_t param, LogicalRole role, const std::string& slot, int64_t first, int64_t count,
                    float* out);
  /// Calls fn over what this rank has of a parameter's tensor of that role, elements [first, first + count).
  void each_memory(uint32_t param, const std::string& role, int64_t first, int64_t count, OptimizerStates::Access use,
                   const std::function<void(void* memory, int64_t first, int64_t count)>& fn);
  /// Calls fn for every tensor that belongs to a parameter, in an order that is the same on all ranks.
  void each_tensor(const std::function<void(uint32_t param, TensorInfo tensor)>& fn) const;
  std::string facts();
  /// Without facts. `differing`: which buffers are stored for each rank (ModelBuffers::differing()).
  CheckpointContents image(const std::vector<char>& differing);
  CheckpointContents present();
  void add_buffers(CheckpointContents& image, const std::vector<char>& differing);
  void prepare_saving(bool first);
  void save_if_due(const GlobalStats& global);
  void settle();
  void not_saved(const Failure& failure);
  void check_complete() const;
  std::optional<std::size_t> array_of(LogicalRole role, const std::string& slot) const;
  /// The slice's masters become the weights where these are not what they round to. True if there were any.
  bool adopt_master(const UpdateSlice& slice);
  void notify_updated();
  void write_totals();
  void write_summary();
  void finish_step(const GlobalStats& global, double rate, int64_t communication_before);
  /// Logs a skipped step: the first ten, then at most one in a hundred steps.
  void report_skip(const GlobalStats& global);
  std::string remedy_for_skips() const;
  /// Ends the job, whose last train.max_skipped_steps steps were skipped; names parameter and rank.
  [[noreturn]] void give_up(const GlobalStats& global) const;
  /// The micro-batches of this step weigh nothing: forgets them and says so, alike on all ranks.
  [[noreturn]] void abandon_step(const GlobalStats& global);

  void write_tiers();
  TierWaits tier_waits() const;
  Setup setup_;
  EngineName name_;
  Model& model_;
  std::shared_ptr<Control> control_;
  int accumulation_ = 1;
  LossScale loss_scale_;
  ModelBuffers model_buffers_;
  Ledger ledger_;
  ThreadPool pool_;
  PluginHost host_;
  std::unique_ptr<Trace> trace_;  // outlives who draws it
  std::unique_ptr<JobServices> services_;
  std::unique_ptr<Instance> strategy_, optimizer_, communicator_;
  std::unique_ptr<CommRuntime> comm_;
  uint32_t granularity_ = 0;
  MemoryPlan plan_;
  std::unique_ptr<PlanInputView> plan_view_;  // what the strategy was bound with
  std::vector<void*> buffers_;                // of the plan, memory peers can read; or addresses of disk_buffers_
  std::vector<const void*> readers_;          // likewise: where an aliased one is read; else null
  Tiers tiers_;
  std::unique_ptr<DiskBackedBuffers> disk_buffers_;  // null: sums and shards are in memory
  std::unique_ptr<OptimizerStates> states_;
  std::unique_ptr<ActivationStore> activations_;  // null: on the device
  std::vector<UpdateSlice> slices_;
  std::unordered_map<std::string, uint32_t> index_;  // of parameters, by name and alias
  ByParam slices_of_, weights_of_;                   // of slices_; of the plan's weight pieces
  std::vector<UpdateSlice> direct_, staged_;         // of them: states on the device; in the memory of a tier
  std::recursive_mutex use_;                         // held around [use] calls of the strategy
  std::unique_ptr<WeightFlow> weight_flow_;
  std::unique_ptr<GradientFlow> gradients_;
  std::unique_ptr<WeightDigest> weight_digest_;
  WeightSamples weight_samples_;
  std::unique_ptr<StepSync> step_sync_;
  std::unique_ptr<RunRecorder> recorder_;
  std::unique_ptr<StopSignal> stop_signal_;
  std::unique_ptr<Saver> saver_;

  const int exceptions_ = std::uncaught_exceptions();  // under way when this began: not this job's
  int64_t step_ = 0;                                   // made so far
  int64_t updates_ = 0;                                // of them not skipped: the schedule's clock
  bool gradients_summed_ = false;                      // those of the last step, until the next backward or load
  bool in_backward_ = false;                           // since an exception ended one, too
  int micro_ = 0;                                      // micro-steps of the coming step made so far
  std::vector<double> losses_, weights_;
  std::vector<int64_t> param_steps_;
  std::vector<double> group_rates_;
  int64_t tokens_ = 0;                   // of this rank since the last step
  int64_t recorded_communication_ = 0;   // bytes of all ranks up to the last step
  int64_t excluded_communication_ = 0;   // bytes of this rank that belong to no step: what set() moved
  int64_t samples_ = 0;                  // of all ranks, all steps
  std::set<uint32_t> stored_full_;       // written by the program, masters not yet
  std::vector<uint64_t> saved_weights_;  // hashes by slice, of the checkpoint that this step saved; empty: of none
  bool unsaved_write_ = false;           // a write behind a checkpoint was reported
  bool incomplete_ = false;              // a load failed when it had begun to write
  bool by_config_ = false;               // the last save was checkpoint.every's, not the program's
  bool stopped_ = false;
  bool applied_ = true;                         // the last step updated the weights
  const ParameterChange* refreshed_ = nullptr;  // while the state of the session before is loaded
  CommVolume earlier_communication_;            // of the sessions before, this rank
  Overlap overlap_before_{};
  int64_t saving_ = 0;                                       // the step of the last save
  std::vector<std::string> declared_buffers_;                // of the image that is being saved
  int64_t skips_ = 0, skips_reported_ = 0, skip_lines_ = 0;  // steps of this run
  int64_t last_skip_line_ = 0;                               // a step
  int64_t begun_ = 0, updates_before_ = 0;                   // steps and updates that this run began behind
  TierWaits waited_;                                         // up to the last lap
  float grad_mul_ = 1;
  struct {
    double loss = 0, grad_norm = 0;
  } last_;
  std::chrono::steady_clock::time_point mark_, step_start_;
};

}  // namespace zr::host
