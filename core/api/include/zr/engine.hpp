// zr::Engine: trains an unmodified torch::nn::Module with the strategy, optimizer and communicator of a TOML file.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zr/program.hpp"

namespace torch::jit {
struct Module;
}

namespace zr {

enum class TensorKind { value, gradient, state };

/// How a checkpoint is taken, and what of it was not.
struct LoadOptions {
  bool weights_only = false;  // optimizer states begin anew, the step stays
  bool strict = true;         // false: what does not fit is listed and left as it is
  bool convert = false;       // weights of another type are rounded from the fp32 master
  bool fallback = false;      // a damaged one is passed over for the one before it, with a warning
};
struct LoadReport {
  std::string folder;
  std::vector<std::string> missing, unexpected, other_shape;
  std::vector<std::string> fresh, dropped;  // optimizer states that begin anew; that only the saved one had
};

/// One per model; a process may have several, used in the same order on all ranks. Several at the same time need
/// names. Methods are for the training thread, which is the one that made the Engine, and are not called inside one
/// another (from hooks). Those marked collective are called on all ranks, with the same arguments and in the same
/// order, under every strategy, even where it moves no data: a call that one rank lacks ends the job with an error that
/// names it. Misuse throws std::runtime_error and changes nothing.
class Engine {
 public:
  /// Loads plug-ins, plans, takes rank 0's parameters and buffers, shards. Collective. The model outlives the Engine,
  /// its parameters keep their identity. Throws std::runtime_error with thing, place and remedy. Program: see
  /// zr/program.hpp.
  Engine(const std::string& toml, torch::nn::Module& model);
  /// `name`: letters, digits, '-' and '_'. An engine with a name has its own folders below those of the job:
  /// runs/NAME/<name>/ and checkpoint.dir/<name>/, for its metrics, checkpoints and resume. Two engines of one program
  /// that are alive at the same time have different names; one after another may have the same.
  Engine(const Program& program, torch::nn::Module& model, const std::string& name = "");
  /// A TorchScript module that has not run yet. What reads weights past libtorch's dispatcher (the fuser), or computes
  /// otherwise after some runs (the profiling executor), is switched off for the process.
  Engine(const Program& program, torch::jit::Module& model, const std::string& name = "");
  ~Engine();  // leaves the job; writes summary.json, unless an exception ended the run before its last step
  Engine(const Engine&) = delete;

  /// One micro-batch's gradients: autograd runs here, buckets leave as they fill. `weight` counts the micro-batch's
  /// tokens where they differ: gradients are of sum(weight * loss) / sum(weight). A weight of 0 contributes nothing,
  /// whatever the loss (a micro-batch without data, whose mean is not a number); others must be from
  /// 1.2e-38 to 3.4e38. The sum over a step must be above 0. Throws if buffers were added to the model, removed or
  /// replaced by tensors of another shape or type and checkpoint.dir is set; replaced by others of the same shape and
  /// type, as forward() of a TorchScript module may do, they are the engine's from then on. Collective. A loss without
  /// autograd graph is rejected. If autograd throws before the first gradient is handed over, it is as if backward had
  /// not been called; after that the engine can neither go on nor be released.
  void backward(const torch::Tensor& loss, double weight = 1);
  /// After every backward. On the accumulation boundary: agree, clip, update, gather; true then. A checkpoint of
  /// checkpoint.every is saved at its end: weights that the program writes after it (clamping, masks) are in the next
  /// one; call save() after the write to have them in the checkpoint of the step. Collective.
  bool step();
  /// Tokens (or samples) of this rank's micro-batch, for the metrics; without it a micro-batch counts
  /// train.micro_batch.
  void add_tokens(int64_t tokens);

  /// Ends this engine and leaves the model with full, ordinary parameters (gradients undefined) for evaluation, export
  /// or another engine: in `dtype`, which is engine.dtype() (the values that the last forward would use) or
  /// torch::kFloat (the fp32 values, equal to get()); floating-point buffers too. Every other method then fails.
  /// Without it, parameters that a strategy shards have no values once the engine is gone. Each rank needs memory for
  /// the full model beside the engine's own (counted for memory.device_budget): where that is lacking it fails on all
  /// ranks and the engine can go on. Between steps, outside Evaluation. Optimizer states are dropped: save() first.
  /// Collective.
  void release();
  void release(torch::ScalarType dtype);  // as above

  /// Of the parameters in forward (train.dtype): cast inputs to it.
  torch::ScalarType dtype() const;
  int rank() const;             // 0 .. world - 1
  int world() const;            // how many ranks train this model together
  int accumulation() const;     // micro-steps a step
  int64_t micro_batch() const;  // samples a micro-batch
  int64_t steps() const;        // train.steps: how many the job shall make
  int64_t step_index() const;   // steps made so far
  /// Of the coming micro-batch within its step, 0 .. world*accumulation-1: what to read is a function of seed, step and
  /// this.
  int64_t micro_index() const;
  int64_t seed() const;           // train.seed
  bool done() const;              // all steps are made, or a signal asked for the end (checkpoint.on_signal)
  bool validation_due() const;    // eval.every steps, and after the last
  double last_loss() const;       // of the last step, mean over ranks and micro-batches
  double last_grad_norm() const;  // of the last step, before clipping
  /// What backward() multiplies the coming step's losses by, with train.dtype = "fp16"; else 1.
  double loss_scale() const;

  /// A parameter's fp32 value, gradient, or optimizer state `slot`, in the parameter's full shape, with the same bits
  /// under every strategy. The gradient is the last step's, summed over ranks and micro-batches and scaled as the
  /// optimizer saw it; it can be read from engine.step() until the next engine.backward(), and is an error otherwise.
  /// Collective.
  torch::Tensor get(const std::string& parameter, TensorKind kind = TensorKind::value, const std::string& slot = "");
  /// Sets value or state on all ranks from this full tensor: dense, real, in CPU memory, of the parameter's shape,
  /// equal on all ranks (compared). Collective.
  void set(const std::string& parameter, TensorKind kind, const torch::Tensor& tensor, const std::string& slot = "");
  /// The value of a buffer, such as a running statistic, that counts for the model as one: ranks have their own during
  /// training, and train.buffers declares whether this is rank 0's, the mean over ranks or each rank's own. A copy with
  /// the buffer's type and shape. Between steps only. Collective.
  torch::Tensor buffer(const std::string& name);
  /// Sets a buffer on all ranks to this tensor, converted to the buffer's type; equal on all ranks, else all throw. Not
  /// during an Evaluation. Between steps only. Collective.
  void set_buffer(const std::string& name, const torch::Tensor& tensor);
  /// Hash of the fp32 weights in name order: the same for every way of sharding. Collective.
  std::string weights_hash();
  /// Ends a run before train.steps, or after more steps, on all ranks alike: summary.json then has the weights hash and
  /// the wire counts. Step train.steps implies it. Collective.
  void finish();
  /// Writes a checkpoint of the present step to a new folder in `dir`, and returns that. Between steps only. A failure
  /// is thrown on all ranks and leaves earlier checkpoints as they were; training may go on. With checkpoint.async it
  /// returns when this rank's part is copied, and a failure is thrown by the next step(), save() or load(). Collective.
  std::string save(const std::string& dir);
  /// A checkpoint of any strategy and number of ranks, the newest in `dir`, or safetensors weights of another program.
  /// Every byte is checked. A failure leaves a model in training as it was; one that was not trained yet may have no
  /// weights then, refuses to train and needs another load. Throws where something does not fit, naming it (see
  /// LoadOptions). Collective.
  LoadReport load(const std::string& dir, const LoadOptions& how = {});
  /// Trains the model's parameters as they are now: after a parameter or module was added, replaced or removed, or
  /// requires_grad changed. backward() throws until it is called where a parameter would not be trained. A tensor that
  /// was trained before keeps its values, optimizer states, fp32 master weights and step count bit for bit, under a new
  /// name too; a new or newly trained one begins with none; one that is frozen or removed loses its states. Step,
  /// schedule, loss scale and this rank's buffers stay; get(gradient) needs another step(). Call it between
  /// steps, outside zr::gather and Evaluation, with the same changes on all ranks: otherwise it throws and nothing
  /// changes. It writes the state to job.runs/job.name/refresh and reads it back, so ranks on several hosts need that
  /// folder on a shared file system. Without a change it does nothing. A parameter that is frozen later
  /// (requires_grad_(false)) needs no refresh(): it keeps its values and states, as under a torch::optim optimizer.
  /// Collective.
  void refresh();
  /// Mean over ranks, in rank order. Collective.
  double mean(double value);
  /// A validation row of metrics.jsonl; `loss` is the same on all ranks (see mean).
  void validation(double loss);

  /// While it lives: gradients off, the training random state kept, the strategy notified, and the model's buffers have
  /// the values that train.buffers declares. Its end gives each rank its own buffers back, bit for bit. May be nested.
  /// backward(), step(), refresh() and release() are rejected inside; after a load() inside, its end leaves the random
  /// state of the checkpoint. It may outlive the engine.
  class Evaluation {
   public:
    explicit Evaluation(Engine& engine);  // collective, as is its end
    ~Evaluation() noexcept(false);
    Evaluation(const Evaluation&) = delete;

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct State;
  /// Throws where the state is gone after a failed refresh().
  class Handle {
   public:
    Handle();
    Handle(std::unique_ptr<State> state);
    ~Handle();
    Handle& operator=(Handle&& other) noexcept;
    State* operator->() const;
    State& operator*() const { return *operator->(); }
    std::unique_ptr<State> take();

   private:
    std::unique_ptr<State> state_;
  };
  Handle state_;
};

}  // namespace zr
