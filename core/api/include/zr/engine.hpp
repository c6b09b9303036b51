// zr::Engine: trains an unmodified torch::nn::Module with the strategy, optimizer and communicator of a TOML file.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zr/program.hpp"

namespace torch::jit {
struct Module;
}

namespace zr {

/// What engine.get() and engine.set() access: the parameter's value, its gradient, or one of its optimizer states.
enum class TensorKind {
  value,     // fp32: the master weight, if the parameter has 16 bits
  gradient,  // of the last step
  state,     // of the optimizer, by name
};

/// Options of engine.load().
struct LoadOptions {
  bool weights_only = false;  // keep the current step; reset the optimizer states
  bool strict = true;         // false: report tensors that do not match and leave them unchanged
  bool convert = false;       // accept weights of another dtype: round them from the fp32 master weights
  bool fallback = false;      // if a checkpoint is damaged, warn and load the previous one
};
/// The result of engine.load(): the checkpoint's folder, and the names of tensors that were not loaded.
struct LoadReport {
  std::string folder;                    // path of the checkpoint's folder
  std::vector<std::string> missing;      // in the model, not in the checkpoint
  std::vector<std::string> unexpected;   // in the checkpoint, not in the model
  std::vector<std::string> other_shape;  // in both, with different shapes
  std::vector<std::string> fresh;        // optimizer states that the checkpoint does not have: they are reset
  std::vector<std::string> dropped;      // optimizer states that only the checkpoint has: they are ignored
};

/// A parameter of the model, as Engine::parameters() lists it.
struct ParameterInfo {
  std::string name;            // from model.named_parameters(); the first name of a parameter that has several
  std::vector<int64_t> shape;  // in elements
  bool trained = true;         // false: requires_grad was false when the engine was created or refreshed
  int group = 0;               // 0: in no group; otherwise 1 + the index in Engine::groups()
};
/// A group of parameters, [[optimizer.groups]], as Engine::groups() lists it.
struct GroupInfo {
  std::vector<std::string> match;                           // patterns of parameter names
  double lr_scale = 1;                                      // factor of the learning rate
  std::vector<std::pair<std::string, std::string>> values;  // keys that the group sets, with their TOML values
  std::string use;                                          // the group's optimizer; empty: the job's
};
/// Memory of this rank, as Engine::memory() lists it: what the engine has allocated, and the activations of libtorch.
struct MemoryUse {
  std::string tier;     // "device", "host" or "disk"
  std::string kind;     // "weights", "gradients", "master", "optimizer", "activations", ...
  int64_t planned = 0;  // bytes in the plan that the engine prints when it begins; 0: not planned
  int64_t now = 0;      // bytes that are allocated
  int64_t peak = 0;     // the most bytes since the engine was created
};
/// The result of a step; the same on all ranks.
struct StepResult {
  int64_t step = 0;          // number of finished steps
  bool skipped = false;      // gradients were not finite, so the weights were not updated
  double loss = 0;           // mean over ranks and micro-batches, or the sum over these (gradients.divisor)
  double gradient_norm = 0;  // global norm before clipping; infinite or NaN if gradients were not finite
  double learning_rate = 0;  // for parameters outside groups
  double loss_scale = 1;     // of the next step
};
/// The tensors of a model that is no module of libtorch, such as a module of another language.
struct ModelTensors {
  /// In the model's order, each with its name, such as "layers.0.weight"; a tied parameter under each of its names. An
  /// undefined tensor is left out.
  std::vector<std::pair<std::string, torch::Tensor>> parameters;
  /// Running statistics and other tensors that are saved with the model, in the same form.
  std::vector<std::pair<std::string, torch::Tensor>> buffers;
};
/// Changes a part of a parameter's gradient in place; see Engine::edit_gradients().
using GradientEdit = std::function<void(const std::string& parameter, torch::Tensor gradient, int64_t first)>;

/// Trains one model. A process may create several engines; all ranks must create and use them in the same order, and
/// engines that exist at the same time need different names.
///
/// Threads: call every method but generator() on the thread that created the engine, and not from inside another engine
/// method (for example from an autograd hook).
///
/// Collective methods must be called by all ranks, in the same order and with the same arguments, under every strategy,
/// also when the strategy communicates nothing. If one rank makes a different call or none, the job ends with an error
/// that names the calls of both ranks.
///
/// Errors: methods throw the subclasses of zr::Error (zr/error.hpp), whose message says what failed, where, why, and
/// what to do. A call that is rejected because of wrong use has no effect, unless its comment says otherwise. After
/// release(), every method throws.
class Engine {
 public:
  /// Loads the plug-ins, plans memory, broadcasts the parameters and buffers of rank 0, and shards the model. `toml` is
  /// the path of the configuration file. The model must outlive the engine; its parameters stay the same tensor
  /// objects. Collective. Under `zeroth plan`, `explain` and `tune` it prints what they ask for and throws ExitRequest.
  Engine(const std::string& toml, torch::nn::Module& model);
  /// Begins training with the configuration of a Program that main() has constructed. `name` (letters, digits, '-' and
  /// '_') gives this engine its own folders, job.runs/job.name/NAME/ and checkpoint.dir/NAME/, for metrics and
  /// checkpoints. Engines that exist at the same time need different names; an engine may reuse the name of one that
  /// was destroyed. Collective.
  Engine(const Program& program, torch::nn::Module& model, const std::string& name = "");
  /// Begins training of a TorchScript module, which must not have run yet. Disables for the whole process TorchScript's
  /// fuser, which reads weights without libtorch's dispatcher, and its profiling executor, which changes results after
  /// the first runs. Collective.
  Engine(const Program& program, torch::jit::Module& model, const std::string& name = "");
  /// Begins training of a model that the engine knows by its tensors alone. `list` returns those that the model has at
  /// the time; the engine calls it here and in later methods, on the same thread, to notice what the program has added,
  /// replaced or removed. Parameters stay the same tensor objects; the model must outlive the engine. An exception of
  /// `list` leaves the method that called it. Collective.
  Engine(const Program& program, std::function<ModelTensors()> list, const std::string& name = "");
  /// Leaves the job. Writes summary.json, unless an exception ended the run between its first and its last step. If the
  /// process exits while the engine exists, this happens before the destructors of static objects, and the destructor
  /// does nothing; nor does it in a child made by fork(), which cannot use the engine. Not collective.
  ~Engine();
  Engine(const Engine&) = delete;

  /// Runs autograd for one micro-batch and hands the gradients to the strategy, which starts to reduce each bucket as
  /// soon as it is full. Frees the autograd graph. Collective.
  ///
  /// `loss` must have one element and an autograd graph. `weight` is for micro-batches of unequal size, for example the
  /// number of tokens: the gradients are those of sum(weight * loss) / sum(weight) over all ranks and micro-batches of
  /// the step. It must be 0 or between 1.2e-38 and 3.4e38 (with train.dtype = "fp16" between 0.001 and 32768); the sum
  /// over a step must be greater than 0. A micro-batch of weight 0 contributes nothing, even if its loss is NaN.
  ///
  /// If autograd throws before it has delivered a gradient, the call has no effect. If it throws later, this engine can
  /// no longer train or be released.
  ///
  /// Throws if a buffer of the model was added, removed or replaced by a tensor of another shape or type while
  /// checkpoint.dir is set. A buffer that was replaced by one of the same shape and type, as forward() of a TorchScript
  /// module may do, is accepted.
  void backward(const torch::Tensor& loss, double weight = 1);
  /// Call it after every backward(). Returns true on the accumulation boundary, after it has computed the global norm,
  /// clipped the gradients, updated the weights and gathered them; otherwise it returns false at once. Writes the
  /// checkpoint that checkpoint.every asks for as its last action: weights that the program changes afterwards
  /// (clamping, masks) are not in it; to include them, call save() after the change. Collective.
  bool step();
  /// Adds to the number of tokens, or other units, that this rank has processed in the current step, for the rates in
  /// metrics.jsonl and on the terminal. `unit`: the word for them there ("images"). Without this call, each micro-batch
  /// counts as train.micro_batch "samples". Not collective. Throws if `tokens` is negative, or `unit` is not a word of
  /// at most 32 letters, digits, '_' and '-'.
  void add_tokens(int64_t tokens, const std::string& unit = "tokens");

  /// The result of the last step of this engine. Not collective.
  StepResult last_step() const;
  /// Calls `callback` on this rank at the end of every step() that returns true, after the checkpoint is written. It
  /// may call the engine's methods. Callbacks run in the order of registration. If one throws, step() throws the
  /// exception; the step is finished. Not collective.
  void on_step(std::function<void(const StepResult&)> callback);

  /// Sets the learning rate, instead of optimizer.lr and [schedule], until the next call of set_lr() or set_schedule().
  /// It applies from the next update. If called within a step, it applies to that step; if updates run in place during
  /// backward (docs/memory-and-communication.md), the call throws after the step's last backward(). Groups multiply it
  /// by their lr_scale. Checkpoints do not contain it: set it again after a resume. `rate` must be finite and at least
  /// 0. Collective.
  void set_lr(double rate);
  /// Sets a schedule: `rate(index)` is the learning rate of update `index`, 0 being the first one of the run and
  /// skipped steps not counting. An empty function restores optimizer.lr and [schedule]. The function must return the
  /// same value on all ranks; step(), or the last backward() with offload.overlap in effect, compares them, and throws
  /// before it changes anything if they differ or are not finite and at least 0. Checkpoints do not contain the
  /// function. Collective.
  void set_schedule(std::function<double(int64_t index)> rate);
  /// Sets the number of micro-batches per rank of the following steps, instead of train.gradient_accumulation. Call it
  /// between steps. A number above 1 needs train.gradient_accumulation above 1, or gradients.reduce =
  /// "last_micro_step", because the memory plan then has sums over micro-batches. Checkpoints do not contain it: set it
  /// again after a resume. Collective.
  void set_accumulation(int accumulation);
  /// Lets the program edit gradients in every following step, for example to clip them by value: between their
  /// reduction and the computation of the global norm, each rank calls `edit` for every part of a gradient that it
  /// updates. `gradient` is a one-dimensional fp32 tensor, valid during the call: elements [first, first + numel) of
  /// the flattened gradient, averaged as gradients.divisor says, without the loss scale. The norm, clipping and the
  /// optimizer use the edited values. Which elements a rank gets depends on the strategy, so results are the same under
  /// every strategy only if `edit` treats each element by itself. It is not called for parts with an infinite or NaN
  /// element, whose step is skipped, and not for parameters without a gradient in the step. Averaging before the edit
  /// rounds once more than a step without `edit`. If it throws, so does step() on all ranks; the weights are unchanged,
  /// and the next backward() begins the step again. An empty function ends this. Call it between steps. Collective.
  void edit_gradients(GradientEdit edit);

  /// The trained and frozen parameters in the model's order. Not collective.
  std::vector<ParameterInfo> parameters() const;
  /// The memory of this rank by tier and kind. Not collective.
  std::vector<MemoryUse> memory() const;
  /// The names of the optimizer's states that get() and set() accept as `slot`: fp32 states of the parameter's shape.
  /// Not collective.
  std::vector<std::string> slots() const;
  /// The groups of [[optimizer.groups]] in the order of the configuration; the first that matches a parameter contains
  /// it. Not collective.
  std::vector<GroupInfo> groups() const;

  /// Ends this engine and gives the model full, ordinary parameters in engine.dtype() (those of train.keep_fp32 in
  /// fp32), for evaluation, export or another engine. Gradients become undefined, optimizer states are lost (call
  /// save() first), buffers of train.cast_buffers have the same dtype. Call it between steps and outside Evaluation.
  /// Without release(), the parameters that a strategy shards have no values after the engine is destroyed. Each rank
  /// needs memory for the full model in addition to the engine's own; it counts towards memory.device_budget. If a rank
  /// lacks this memory, all ranks throw and the engine stays usable. Collective.
  void release();
  /// Releases the model with parameters in `dtype`: engine.dtype(), for the values that the next forward pass would
  /// use, or torch::kFloat, for the fp32 values that get() returns. Collective.
  void release(torch::ScalarType dtype);

  /// The dtype of the parameters in the forward pass (train.dtype). Convert floating-point inputs to it.
  torch::ScalarType dtype() const;
  /// The device that the model computes on (job.device). Move inputs to it: x.to(engine.device()).
  torch::Device device() const;
  int rank() const;             // 0 to world() - 1
  int world() const;            // number of ranks that train this model
  int accumulation() const;     // micro-batches per rank and step (train.gradient_accumulation, set_accumulation())
  int64_t micro_batch() const;  // samples per micro-batch (train.micro_batch)
  int64_t steps() const;        // number of steps of the run (train.steps)
  int64_t step_index() const;   // number of finished steps
  /// Index of the next micro-batch within its step, 0 to world() * accumulation() - 1, different on each rank. Choose
  /// the data from seed(), step_index() and this index: then a resumed run reads the same data.
  int64_t micro_index() const;
  int64_t seed() const;  // train.seed
  /// A new CPU generator for the program's own random numbers, such as those of a thread that loads data: draws from it
  /// leave the generator of the model, which dropout uses, as it is. Seeded by train.seed and `key`: the same key gives
  /// the same numbers in every run, on every rank, also in a resumed one. Choose the key as the data, such as the index
  /// of the sample. Also on other threads, which must not outlive the engine.
  at::Generator generator(int64_t key) const;
  int64_t samples() const;        // number of samples of all ranks in all finished steps, also of resumed ones
  bool done() const;              // all steps are finished, or a signal stopped the run (checkpoint.on_signal)
  bool validation_due() const;    // after every eval.every steps and after the last step
  double last_loss() const;       // loss of the last step, as StepResult has it
  double last_grad_norm() const;  // global gradient norm of the last step, before clipping
  /// The loss scale of the next step with train.dtype = "fp16", otherwise 1. backward() applies it to the loss.
  double loss_scale() const;

  /// Returns a copy of the parameter's fp32 value, gradient, or optimizer state `slot` as a new tensor: fp32, CPU,
  /// contiguous, in the parameter's full shape, the same on every rank and bit-identical under every strategy.
  /// `parameter` is a name from model.named_parameters(). `slot` is a state name of the optimizer plug-in, such as
  /// "exp_avg" (`zeroth show DIR` lists the states in a checkpoint); leave it empty for the other kinds. The gradient
  /// is the one that the optimizer used: summed, averaged (gradients.divisor) and clipped. It is available
  /// from step() to the next backward(), unless updates run in place during backward
  /// (docs/memory-and-communication.md); at other times the call throws. With such updates, no kind can be read between
  /// the last backward() of a step and step(). Collective.
  torch::Tensor get(const std::string& parameter, TensorKind kind = TensorKind::value, const std::string& slot = "");
  /// Sets the value or an optimizer state of a parameter on all ranks. `tensor` must be a dense, real tensor on the CPU
  /// or on device(), in the parameter's full shape, with the same values on all ranks (the call compares them); it is
  /// converted to fp32 and copied. A gradient cannot be set. Collective.
  void set(const std::string& parameter, TensorKind kind, const torch::Tensor& tensor, const std::string& slot = "");
  /// Returns a copy of a model buffer, such as a running statistic, with the buffer's dtype, shape and device. Ranks
  /// update their own buffers during training; train.buffers declares whether this call returns rank 0's values, the
  /// mean over ranks, or each rank's own. Call it between steps. Collective.
  torch::Tensor buffer(const std::string& name);
  /// Sets a buffer on all ranks to a copy of `tensor`, converted to the buffer's dtype. If the values differ between
  /// ranks, all ranks throw. Call it between steps and outside Evaluation. Collective.
  void set_buffer(const std::string& name, const torch::Tensor& tensor);
  /// Returns a hash (16 hexadecimal digits) of all fp32 weights in name order. It is independent of the strategy and
  /// the number of ranks. Collective.
  std::string weights_hash();
  /// Ends a run at another step than train.steps: writes the weights hash and the communication volume to summary.json.
  /// Step number train.steps does this by itself. Collective.
  void finish();
  /// Writes a checkpoint of the current step to a new folder in `dir` and returns the path of the new folder. Removes
  /// the oldest checkpoints in `dir` if it has more than checkpoint.keep. Call it between steps. If it fails, all ranks
  /// throw, existing checkpoints are unchanged, and training can continue. With checkpoint.async it returns as soon as
  /// this rank's data is copied, before the returned folder exists; the next step(), save() or load() throws if writing
  /// failed. Collective.
  std::string save(const std::string& dir);
  /// Loads a checkpoint: one that any strategy and number of ranks wrote, the newest one in `dir`, or safetensors
  /// weights of another program, or a state dictionary of PyTorch: a zip archive, or a file whose name ends in .pt,
  /// .pth, .bin or .ckpt. Rank 0 converts the tensors of a state dictionary that the model has to a temporary
  /// safetensors file in TMPDIR. Verifies every byte that it reads of a checkpoint, and the checksums of the tensors
  /// that it converts, if the file has them. Throws if a tensor does not match and names it (see LoadOptions). Files of
  /// other programs may list a tied parameter under several names; if their values differ, it throws, or reports the
  /// others as unexpected. If loading fails, a model that was already trained is unchanged; a model that was not
  /// trained yet may have undefined weights and then cannot train until another load succeeds. Collective.
  LoadReport load(const std::string& dir, const LoadOptions& how = {});
  /// Adapts the engine to the model's current parameters, after the program has added, replaced or removed a parameter
  /// or module, or changed requires_grad. backward() throws until refresh() is called if a parameter would not be
  /// trained otherwise. Collective.
  ///
  /// A parameter that was trained before keeps its value, optimizer states, fp32 master weights and step count bit for
  /// bit, also under a new name. A new or newly trained parameter starts with fresh optimizer states. A frozen or
  /// removed parameter loses its states. The step, the schedule, the loss scale and this rank's buffers are unchanged;
  /// get(gradient) throws until the next step().
  ///
  /// Call it between steps, outside zr::gather and Evaluation, with the same changes on all ranks; otherwise all ranks
  /// throw and nothing changes. If nothing has changed, it does nothing. It writes the state to the folder `refresh` of
  /// its run folder (job.runs/job.name/RUN) and reads it back, so ranks on several nodes need that folder on a shared
  /// file system.
  /// If it fails while it reads the state back, the engine becomes unusable, and the error names the checkpoint to
  /// load.
  ///
  /// Freezing a parameter (requires_grad_(false)) needs no refresh(): it keeps its value and states, as with a
  /// torch::optim optimizer.
  void refresh();
  /// Returns the mean of `value` over ranks, summed in rank order. Collective.
  double mean(double value);
  /// Returns the sum over ranks, element by element, with the tensor's dtype and shape: added in rank order, bf16 and
  /// fp16 in fp32 with one rounding at the end. As for the next two, `tensor` must be a dense tensor on the CPU or on
  /// device(), of the same dtype and shape on all ranks; otherwise all ranks throw. The result is on the same device.
  /// sum() also throws for dtypes that libtorch does not add, such as kBool, kUInt16 and kFloat8_e5m2. Collective.
  torch::Tensor sum(const torch::Tensor& tensor);
  /// Returns the tensors of all ranks, stacked in rank order: shape [world(), ...]. Collective.
  torch::Tensor all_gather(const torch::Tensor& tensor);
  /// Returns a copy of rank `root`'s tensor. Collective.
  torch::Tensor broadcast(const torch::Tensor& tensor, int root = 0);
  /// Waits until all ranks have called it. Collective.
  void barrier();
  /// Writes a validation row to metrics.jsonl. Pass the same loss on all ranks (see mean()). Not collective.
  void validation(double loss);

  /// A scope for evaluation: disables gradients, saves and restores the random state of training, notifies the
  /// strategy, and gives the model's buffers the values that train.buffers declares; its end restores each rank's own
  /// buffers bit for bit. Scopes can be nested. backward(), step(), refresh() and release() throw inside. After a
  /// load() inside, the end keeps the random state of the checkpoint. The scope may outlive the engine.
  class Evaluation {
   public:
    /// Begins the scope. Collective.
    explicit Evaluation(Engine& engine);
    /// Ends the scope. Collective, unless an exception unwinds the stack. May throw zr::Error.
    ~Evaluation() noexcept(false);
    Evaluation(const Evaluation&) = delete;

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct State;
  class StateDictFile;
  bool make_step();
  /// Access to the state. Throws if a failed refresh() has destroyed it.
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
  friend class Swap;
};

}  // namespace zr
