// One row per key of the engine: its field in HostConfig, which also gives its name and type, then its default as TOML
// text, its meaning, and what else restricts its values.
#include <functional>

#include "base/limits.hpp"
#include "config/key.hpp"
#include "config/key_reader.hpp"
#include "config/precision.hpp"
#include "config/setting_of.hpp"

namespace zr::host::config {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kMax = kMaxSteps;         // upper bound of counts: steps, samples, micro-batches
constexpr double kMaxRanks = 1024;         // started by one launcher
constexpr double kLongest = 30 * 86400.0;  // seconds

struct HostKey {
  ConfigKey key;
  std::function<void(const Entry&, HostConfig&)> read;  // writes the field; none for the plug-in of a role
};

// Restricts the values of a key; without it, the type of the field allows all.
struct Values {
  double min = -kInf, max = kInf;
  std::vector<std::string> choices{};  // of a string; those of an enum if it has fewer values than the enum
  PathKind path_kind = PathKind::none;
};

template <class T>
constexpr uint32_t type_of() {
  if constexpr (std::is_same_v<T, bool>) return ZR_KEY_BOOL;
  if constexpr (std::is_same_v<T, int> || std::is_same_v<T, int64_t>) return ZR_KEY_INT;
  if constexpr (std::is_same_v<T, double>) return ZR_KEY_FLOAT;
  if constexpr (std::is_same_v<T, std::chrono::milliseconds>) return ZR_KEY_DURATION;
  if constexpr (std::is_same_v<T, std::vector<std::string>>) return kPatterns;
  return ZR_KEY_STRING;
}

ConfigKey key_at(const std::string& path, uint32_t type, const char* def, std::string meaning, Values values) {
  const auto dot = path.rfind('.');
  ConfigKey key{path.substr(0, dot), path.substr(dot + 1), type, def, std::move(meaning), values.min, values.max};
  key.choices = std::move(values.choices);
  key.path_kind = values.path_kind;
  return key;
}

// The path of a field of HostConfig, and a function that returns the field.
#define FIELD(path) \
#path, [](HostConfig & config) -> auto& { return config.path; }

template <class Field>
HostKey row(const char* path, Field, const char* def, std::string meaning, Values values = {}) {
  using T = std::remove_reference_t<decltype(std::declval<Field>()(std::declval<HostConfig&>()).value)>;
  if constexpr (std::is_enum_v<T>)
    if (values.choices.empty())
      for (const auto& choice : choices_of(T{})) values.choices.emplace_back(choice.text);
  if constexpr (std::is_same_v<T, TierChoice>) values.path_kind = PathKind::name_or_path;
  return {key_at(path, type_of<T>(), def, std::move(meaning), std::move(values)),
          [](const Entry& entry, HostConfig& to) { Field{}(to) = setting_of<T>(entry); }};
}

// A string that names a dtype.
template <class Field>
HostKey dtype(const char* path, Field, const char* def, std::string meaning, std::vector<std::string> choices) {
  Values values;
  values.choices = std::move(choices);
  return {key_at(path, ZR_KEY_STRING, def, std::move(meaning), std::move(values)),
          [](const Entry& entry, HostConfig& to) {
            Field{}(to) = {dtype_in(entry), entry.key.path(), entry.written, entry.origin, entry.given_path};
          }};
}

// A row whose values are written in another way than others of its type: sizes in bytes, words in one string.
HostKey written_as(uint32_t type, HostKey row) {
  row.key.type = type;
  return row;
}

// The plug-in of a role; Document::chosen() has its id.
HostKey role(const char* name, const char* def, const char* meaning) {
  ConfigKey key{"", name, ZR_KEY_STRING, def, meaning};
  key.path_kind = PathKind::name_or_path;
  return {std::move(key), {}};
}

using Rows = std::vector<HostKey>;

Rows roles_and_job() {
  return {
      role("strategy", "\"" ZR_DEFAULT_STRATEGY "\"",
           "which rank owns which part of weights, gradients and optimizer states"),
      role("optimizer", "\"" ZR_DEFAULT_OPTIMIZER "\"", "update rule of the weights"),
      role("communicator", "\"auto\"",
           "library that runs the collectives; auto: \"" ZR_HOST_COMMUNICATOR
           "\" if all ranks are on one host, else \"" ZR_HOSTS_COMMUNICATOR
           "\"; with job.device, a library for the device first"),
      row(FIELD(job.program), "\"\"", "training program: the path of an executable, or the name of one in bin/",
          {.path_kind = PathKind::program}),
      row(FIELD(job.ranks), "1", "number of ranks (processes)", {.min = 1, .max = kMaxRanks}),
      row(FIELD(job.threads), "0",
          "threads per rank; 0: the cores, or the quota of the control group (container), divided by the ranks of the "
          "node",
          {.min = 0, .max = 1024}),
      row(FIELD(job.name), "\"\"", "name of the run folder in job.runs; empty: the name of this file"),
      row(FIELD(job.device), "\"cpu\"", "device of the model: cpu, cuda, cuda:0 or another device of libtorch"),
      row(FIELD(job.device_library), "\"\"", "library with libtorch's backend for job.device; empty: part of libtorch",
          {.path_kind = PathKind::path}),
      row(FIELD(job.trace), "false", "write a timeline of each rank to the run folder, for Perfetto"),
      row(FIELD(job.runs), "\"runs\"", "folder that contains the run folders", {.path_kind = PathKind::path}),
  };
}

Rows train() {
  return {
      row(FIELD(train.steps), "100", "optimizer steps to train", {.min = 0, .max = kMax}),
      row(FIELD(train.seed), "0", "seed of weights, batches and dropout", {.min = 0}),
      dtype(FIELD(train.dtype), "\"fp32\"", "dtype of weights and activations; masters and optimizer states stay fp32",
            {"fp32", "bf16", "fp16"}),
      row(FIELD(train.param_dtype), "\"convert\"",
          "parameters that are neither fp32 nor train.dtype, such as double ones: convert and report them, or reject "
          "the model"),
      row(FIELD(train.global_batch), "0", "samples per step; 0: micro_batch x gradient_accumulation x ranks",
          {.min = 0, .max = kMax}),
      row(FIELD(train.micro_batch), "0", "samples per backward and rank; 0: derived from the other two",
          {.min = 0, .max = kMax}),
      row(FIELD(train.gradient_accumulation), "0", "micro-batches per step and rank; 0: derived from the other two",
          {.min = 0, .max = kMax}),
      row(FIELD(train.gradient_clipping), "0.0", "maximum global gradient norm; 0: no clipping", {.min = 0}),
      row(FIELD(train.nonfinite), "\"skip\"",
          "a step with non-finite gradients: skip it, or stop the job; stop allows the update of states on tiers to "
          "begin during backward"),
      row(FIELD(train.max_skipped_steps), "50",
          "consecutive steps that may be skipped for non-finite gradients before the job fails",
          {.min = 1, .max = kMax}),
      row(FIELD(train.buffers), "\"rank0\"",
          "the model's buffers in evaluation, in exported files and after a change of world size: rank 0's, the mean "
          "over ranks, or each rank's own; training always uses each rank's own"),
      row(FIELD(train.keep_fp32), "[]",
          "parameters of a 16-bit model that stay fp32, by name, such as norms: their operators need fp32 inputs"),
      row(FIELD(train.cast_buffers), "[]",
          "floating-point buffers of the model that are converted to train.dtype, by name; the others keep their "
          "types"),
  };
}

Rows gradients() {
  return {
      row(FIELD(gradients.overlap), "true",
          "reduce buckets during backward; false: after it (for models that call backward inside backward)"),
      row(FIELD(gradients.reduce), "\"each_micro_step\"",
          "each_micro_step: reduce after every micro-step; last_micro_step: accumulate on each rank, then reduce once: "
          "less communication, different rounding"),
      row(FIELD(gradients.divisor), "\"ranks_and_micro_steps\"",
          "what the sum of a step's gradients is divided by: ranks_and_micro_steps: the micro-batches, or the sum of "
          "their weights; ranks: the ranks, so micro-steps add up, as in DDP"),
      dtype(FIELD(gradients.dtype), "\"fp32\"", "dtype of reduced gradients: sums over micro-batches and ranks",
            {"fp32", "bf16"}),
      dtype(FIELD(gradients.reduce_dtype), "\"auto\"",
            "dtype in which gradients are communicated; auto: the weights' dtype, but gradients.dtype if that is bf16 "
            "or if gradients.reduce is last_micro_step",
            {"auto", "fp32", "bf16", "fp16"}),
  };
}

// Names, defaults and meanings are DeepSpeed's.
Rows loss_scale() {
  return {
      row(FIELD(fp16.loss_scale), "0.0", "static loss scale; 0: dynamic, by the keys below", {.min = 0}),
      row(FIELD(fp16.initial_scale_power), "16", "the initial scale is 2 to this power", {.min = 0, .max = 64}),
      row(FIELD(fp16.loss_scale_window), "1000", "steps without overflow after which the scale doubles",
          {.min = 1, .max = kMax}),
      row(FIELD(fp16.hysteresis), "2", "overflows before the scale is halved", {.min = 1, .max = kMax}),
      row(FIELD(fp16.consecutive_hysteresis), "false",
          "a step without overflow resets the hysteresis counter; false: only a step that doubles the scale does"),
      row(FIELD(fp16.min_loss_scale), "1.0", "lower bound of the dynamic scale", {.min = 0}),
  };
}

Rows memory_and_optimizer() {
  return {
      written_as(ZR_KEY_BYTES, row(FIELD(memory.device_budget), "\"0B\"",
                                   "limit of device memory per rank, activations included; with job.device, of the "
                                   "memory of that device; 0: no limit",
                                   {.min = 0})),
      written_as(ZR_KEY_BYTES, row(FIELD(memory.host_budget), "\"0B\"",
                                   "limit of host memory for all ranks of a node together, in addition to device "
                                   "memory: tiers, staging buffers, copies for checkpoints; 0: no limit",
                                   {.min = 0})),
      row(FIELD(optimizer.lr), "1e-3", "learning rate; the full rate of the schedule", {.min = 0}),
  };
}

// The keys of a schedule's rise to the full rate.
#define RISE(table)                                                                                           \
  row(FIELD(table.warmup), "0", "steps of rise to the full rate; 0: none", {.min = 0, .max = kMax}),          \
      row(FIELD(table.warmup_from), "-1", "step at which the rise begins, at start_ratio; -1: before step 0", \
          {.min = -1, .max = kMax}),                                                                          \
      row(FIELD(table.warmup_type), "\"linear\"", "shape of the rise"),                                       \
      row(FIELD(table.start_ratio), "0.0", "fraction of the full rate at which the rise begins", {.min = 0, .max = 1})
#define FALL(table)                                                                                             \
  row(FIELD(table.decay_from), "@" #table ".warmup", "step at which the fall begins", {.min = 0, .max = kMax}), \
      row(FIELD(table.decay_until), "@train.steps", "step from which on the rate is the final one",             \
          {.min = 0, .max = kMax}),                                                                             \
      row(FIELD(table.final_ratio), "0.0", "fraction of the full rate that remains after the fall",             \
          {.min = 0, .max = 1})

Rows schedules() {
  return {
      row(FIELD(schedule.use), "\"constant\"", "learning-rate schedule; its options are in [schedule.<name>]"),
      RISE(schedule.constant),
      RISE(schedule.linear),
      FALL(schedule.linear),
      RISE(schedule.cosine),
      FALL(schedule.cosine),
      row(FIELD(schedule.one_cycle.rise), "0.3", "fraction of the steps in which the rate rises to the full rate",
          {.min = 0, .max = 1}),
      row(FIELD(schedule.one_cycle.start_ratio), "0.04", "fraction of the full rate at the first step",
          {.min = 0, .max = 1}),
      row(FIELD(schedule.one_cycle.final_ratio), "4e-6", "fraction of the full rate at the last step",
          {.min = 0, .max = 1}),
      row(FIELD(schedule.range_test.min_lr), "1e-3", "rate at the first step", {.min = 0}),
      row(FIELD(schedule.range_test.step_size), "2000", "steps per interval", {.min = 1, .max = kMax}),
      row(FIELD(schedule.range_test.step_rate), "1.0", "growth per interval, in units of min_lr", {.min = 0}),
      row(FIELD(schedule.range_test.staircase), "false", "increase the rate once per interval instead of every step"),
  };
}
#undef RISE
#undef FALL

Rows eval_and_communicator() {
  return {
      row(FIELD(eval.every), "0", "steps between validations; 0: never", {.min = 0, .max = kMax}),
      row(FIELD(communicator.share_weights), "true",
          "ranks of a node share one copy of the weights, if strategy and communicator support it"),
      row(FIELD(communicator.exact), "true",
          "false: sums of gradients may add the ranks of each host first, which saves bytes between hosts"),
      row(FIELD(communicator.gradients), "\"exact\"",
          "gradients between hosts: exact, or rounded to integers of 8 or 4 bits with a scale per block"),
      row(FIELD(communicator.weights), "\"exact\"",
          "sharded weights between hosts, for forward and backward: exact, or rounded to 8 bits",
          {.choices = {"exact", "int8"}}),
  };
}

Rows checkpoint() {
  return {
      row(FIELD(checkpoint.dir), "\"\"", "folder for checkpoints", {.path_kind = PathKind::path}),
      row(FIELD(checkpoint.every), "0", "steps between checkpoints; 0: only when the program calls engine.save()",
          {.min = 0, .max = kMax}),
      row(FIELD(checkpoint.keep), "0", "number of newest checkpoints to keep; 0: all", {.min = 0, .max = kMax}),
      row(FIELD(checkpoint.async), "false", "write in the background from a copy of this rank's shard"),
      row(FIELD(checkpoint.on_signal), "\"end\"",
          "action on SIGTERM and SIGINT; save: finish the step, save a checkpoint, then exit"),
      row(FIELD(checkpoint.resume), "false", "start from the newest checkpoint in the folder, if any"),
      row(FIELD(checkpoint.fallback), "false", "skip a damaged checkpoint and load the previous one; false: fail"),
      row(FIELD(checkpoint.init), "\"\"",
          "initial weights: a checkpoint, a safetensors file, or a folder of safetensors files with an index",
          {.path_kind = PathKind::path}),
      row(FIELD(checkpoint.strict), "true", "fail if a tensor does not match the model; false: load those that match"),
      row(FIELD(checkpoint.convert), "false",
          "convert weights of another dtype, from the fp32 masters if the checkpoint has them"),
  };
}

Rows offload() {
  const std::string where = ": device, auto (the tiers of offload.tiers take what exceeds the budgets), or a tier";
  return {
      row(FIELD(offload.optimizer), "\"device\"", "where fp32 masters and optimizer states are stored" + where),
      row(FIELD(offload.gradients), "\"device\"", "where reduced gradients are stored until the update" + where),
      row(FIELD(offload.parameters), "\"device\"", "where sharded weights are stored between uses" + where),
      row(FIELD(offload.activations), "\"device\"",
          "where saved activations are stored: device, auto (the tiers of offload.tiers, if the measured activations "
          "exceed the device budget), or a tier"),
      row(FIELD(offload.overlap), "true",
          "update states on tiers during backward where this cannot change the result; with job.device, copy their "
          "gradients to host memory during backward"),
      written_as(ZR_KEY_BYTES, row(FIELD(offload.activation_bytes), "\"64KiB\"",
                                   "smaller activations stay on the device", {.min = 1})),
      row(FIELD(offload.device_fraction), "0.0", "fraction of the optimizer states that stays on the device",
          {.min = 0, .max = 1}),
      written_as(ZR_KEY_STRING, row(FIELD(offload.tiers), "\"" ZR_DEFAULT_TIERS "\"",
                                    "tiers that auto fills after the device, in this order; a tier after the first "
                                    "needs a table in this file")),
      row(FIELD(communicator.timeout), "\"5min\"",
          "longest wait of a rank for its peers; a longer wait is reported as a hang", {.min = 0.001, .max = kLongest}),
  };
}
#undef FIELD

// In the order in which keys are validated and listed.
const Rows& table() {
  static const auto* rows = [] {
    auto* all = new Rows;  // never destroyed
    for (Rows (*part)() : {roles_and_job, train, gradients, loss_scale, memory_and_optimizer, schedules,
                           eval_and_communicator, checkpoint, offload})
      for (HostKey& row : part()) all->push_back(std::move(row));
    return all;
  }();
  return *rows;
}

}  // namespace

const std::vector<ConfigKey>& host_keys() {
  static const auto* keys = [] {
    auto* all = new std::vector<ConfigKey>;  // never destroyed
    for (const HostKey& row : table()) all->push_back(row.key);
    return all;
  }();
  return *keys;
}

HostConfig read_host_config(const JobConfig& config) {
  const KeyReader keys(config);
  HostConfig host;
  for (const HostKey& row : table()) {
    const std::string path = row.key.path();
    const bool unselected = row.key.table.starts_with("schedule.") && !keys.has(path);
    if (row.read && !unselected) row.read(keys.entry(path), host);
  }
  host.precision = precision_of(host.train, host.gradients);
  return host;
}

}  // namespace zr::host::config
