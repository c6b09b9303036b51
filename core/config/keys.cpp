#include <fmt/format.h>

#include <cmath>

#include "base/limits.hpp"
#include "base/text.hpp"
#include "config/key.hpp"
#include "config/value.hpp"

namespace zr::host::config {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kMax = kMaxSteps;         // upper bound of counts: steps, samples, micro-batches
constexpr double kMaxRanks = 1024;         // started by one launcher
constexpr double kLongest = 30 * 86400.0;  // seconds

ConfigKey flag(std::string table, std::string name, std::string def, std::string meaning) {
  return {std::move(table), std::move(name), ZR_KEY_BOOL, std::move(def), std::move(meaning)};
}
ConfigKey integer(std::string table, std::string name, std::string def, double min, double max, std::string meaning) {
  return {std::move(table), std::move(name), ZR_KEY_INT, std::move(def), std::move(meaning), min, max};
}
ConfigKey real(std::string table, std::string name, std::string def, double min, double max, std::string meaning) {
  return {std::move(table), std::move(name), ZR_KEY_FLOAT, std::move(def), std::move(meaning), min, max};
}
ConfigKey text(std::string table, std::string name, std::string def, std::string meaning,
               std::vector<std::string> choices = {}) {
  ConfigKey key{std::move(table), std::move(name), ZR_KEY_STRING, std::move(def), std::move(meaning)};
  key.choices = std::move(choices);
  return key;
}

ConfigKey path(std::string table, std::string name, std::string def, std::string meaning,
               PathKind kind = PathKind::path) {
  ConfigKey key = text(std::move(table), std::move(name), std::move(def), std::move(meaning));
  key.path_kind = kind;
  return key;
}

// The id of a plug-in, or its file.
ConfigKey plugin(std::string table, std::string name, std::string def, std::string meaning) {
  return path(std::move(table), std::move(name), std::move(def), std::move(meaning), PathKind::name_or_path);
}

void add_schedules(std::vector<ConfigKey>& keys) {
  keys.push_back(
      text("schedule", "use", "\"constant\"", "learning-rate schedule; its options are in [schedule.<name>]",
           {"constant", "linear", "cosine", "one_cycle", "range_test", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}));
  for (const char* name : {"constant", "linear", "cosine"}) {
    const std::string table = std::string("schedule.") + name;
    keys.push_back(integer(table, "warmup", "0", 0, kMax, "steps of linear rise to the full rate"));
    if (table != "schedule.constant")
      keys.push_back(
          real(table, "final_ratio", "0.0", 0, 1, "fraction of the full rate that remains after the last step"));
  }
  keys.push_back(real("schedule.one_cycle", "rise", "0.3", 0, 1,
                      "fraction of the steps in which the rate rises to the full rate"));
  keys.push_back(
      real("schedule.one_cycle", "start_ratio", "0.04", 0, 1, "fraction of the full rate at the first step"));
  keys.push_back(real("schedule.one_cycle", "final_ratio", "4e-6", 0, 1, "fraction of the full rate at the last step"));
  keys.push_back(real("schedule.range_test", "min_lr", "1e-3", 0, kInf, "rate at the first step"));
  keys.push_back(integer("schedule.range_test", "step_size", "2000", 1, kMax, "steps per interval"));
  keys.push_back(real("schedule.range_test", "step_rate", "1.0", 0, kInf, "growth per interval, in units of min_lr"));
  keys.push_back(
      flag("schedule.range_test", "staircase", "false", "increase the rate once per interval instead of every step"));
  for (const char* name : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}) {
    const std::string table = std::string("schedule.") + name;
    if (table != "schedule.WarmupLR")
      keys.push_back(integer(table, "total_num_steps", "@train.steps", 1, kMax, "step at which the decay ends"));
    if (table != "schedule.WarmupCosineLR") {
      keys.push_back(real(table, "warmup_min_lr", "0.0", 0, kInf, "rate before the warm-up"));
      keys.push_back(real(table, "warmup_max_lr", "@optimizer.lr", 0, kInf, "rate after the warm-up"));
    } else {
      keys.push_back(
          real(table, "warmup_min_ratio", "0.0", 0, 1, "fraction of the full rate at the start of the warm-up"));
      keys.push_back(real(table, "cos_min_ratio", "1e-4", 0, 1, "fraction of the full rate at the end of the cosine"));
    }
    keys.push_back(integer(table, "warmup_num_steps", "1000", 1, kMax, "steps of the warm-up"));
    keys.push_back(text(table, "warmup_type", "\"log\"", "shape of the warm-up", {"log", "linear"}));
  }
}

// Names, defaults and meanings are DeepSpeed's.
void add_loss_scale(std::vector<ConfigKey>& keys) {
  keys.push_back(real("fp16", "loss_scale", "0.0", 0, kInf, "static loss scale; 0: dynamic, by the keys below"));
  keys.push_back(integer("fp16", "initial_scale_power", "16", 0, 64, "the initial scale is 2 to this power"));
  keys.push_back(
      integer("fp16", "loss_scale_window", "1000", 1, kMax, "steps without overflow after which the scale doubles"));
  keys.push_back(integer("fp16", "hysteresis", "2", 1, kMax, "overflows before the scale is halved"));
  keys.push_back(
      flag("fp16", "consecutive_hysteresis", "false",
           "a step without overflow resets the hysteresis counter; false: only a step that doubles the scale does"));
  keys.push_back(real("fp16", "min_loss_scale", "1.0", 0, kInf, "lower bound of the dynamic scale"));
}

void add_checkpoint(std::vector<ConfigKey>& keys) {
  keys.push_back(path("checkpoint", "dir", "\"\"", "folder for checkpoints"));
  keys.push_back(integer("checkpoint", "every", "0", 0, kMax,
                         "steps between checkpoints; 0: only when the program calls engine.save()"));
  keys.push_back(integer("checkpoint", "keep", "0", 0, kMax, "number of newest checkpoints to keep; 0: all"));
  keys.push_back(flag("checkpoint", "async", "false", "write in the background from a copy of this rank's shard"));
  keys.push_back(text("checkpoint", "on_signal", "\"end\"",
                      "action on SIGTERM and SIGINT; save: finish the step, save a checkpoint, then exit",
                      {"end", "save"}));
  keys.push_back(flag("checkpoint", "resume", "false", "start from the newest checkpoint in the folder, if any"));
  keys.push_back(
      flag("checkpoint", "fallback", "false", "skip a damaged checkpoint and load the previous one; false: fail"));
  keys.push_back(
      path("checkpoint", "init", "\"\"",
           "initial weights: a checkpoint, a safetensors file, or a folder of safetensors files with an index"));
  keys.push_back(
      flag("checkpoint", "strict", "true", "fail if a tensor does not match the model; false: load those that match"));
  keys.push_back(flag("checkpoint", "convert", "false",
                      "convert weights of another dtype, from the fp32 masters if the checkpoint has them"));
}

void add_offload(std::vector<ConfigKey>& keys) {
  const std::string where = ": device, auto (the tiers of offload.tiers take what exceeds the budgets), or a tier";
  keys.push_back(
      plugin("offload", "optimizer", "\"device\"", "where fp32 masters and optimizer states are stored" + where));
  keys.push_back(
      plugin("offload", "gradients", "\"device\"", "where reduced gradients are stored until the update" + where));
  keys.push_back(
      plugin("offload", "parameters", "\"device\"", "where sharded weights are stored between uses" + where));
  keys.push_back(plugin(
      "offload", "activations", "\"device\"",
      "where saved activations are stored: device, auto (the tiers of offload.tiers, if the measured activations "
      "exceed the device budget), or a tier"));
  keys.push_back(flag("offload", "overlap", "true",
                      "update states on tiers during backward where this cannot change the result; with job.device, "
                      "copy their gradients "
                      "to host memory during backward"));
  keys.push_back(text("offload", "speculate", "\"auto\"",
                      "offload.overlap also in steps that may be skipped or clipped, with a second copy of the states: "
                      "auto (if it fits in memory.host_budget and on the disk, and while at most half of the steps "
                      "are), always, never",
                      {"auto", "always", "never"}));
  ConfigKey min_activation{"offload", "activation_bytes", ZR_KEY_BYTES, "\"64KiB\"",
                           "smaller activations stay on the device"};
  min_activation.min = 1;
  keys.push_back(min_activation);
  keys.push_back(
      real("offload", "device_fraction", "0.0", 0, 1, "fraction of the optimizer states that stays on the device"));
  keys.push_back(
      text("offload", "tiers", "\"" ZR_DEFAULT_TIERS "\"",
           "tiers that auto fills after the device, in this order; a tier after the first needs a table in this file"));
}

void add_roles(std::vector<ConfigKey>& keys) {
  keys.push_back(plugin("", "strategy", "\"" ZR_DEFAULT_STRATEGY "\"",
                        "which rank owns which part of weights, gradients and optimizer states"));
  keys.push_back(plugin("", "optimizer", "\"" ZR_DEFAULT_OPTIMIZER "\"", "update rule of the weights"));
  keys.push_back(plugin("", "communicator", "\"auto\"",
                        "library that runs the collectives; auto: \"" ZR_HOST_COMMUNICATOR
                        "\" if all ranks are on one host, else \"" ZR_HOSTS_COMMUNICATOR
                        "\"; with job.device, a library for the device first"));
}

void add_job(std::vector<ConfigKey>& keys) {
  keys.push_back(path("job", "program", "\"\"",
                      "training program: the path of an executable, or the name of one in bin/", PathKind::program));
  keys.push_back(integer("job", "ranks", "1", 1, kMaxRanks, "number of ranks (processes)"));
  keys.push_back(integer("job", "threads", "0", 0, 1024,
                         "threads per rank; 0: the cores, or the quota of the control group (container), divided by "
                         "the ranks of the node"));
  keys.push_back(text("job", "name", "\"\"", "name of the run folder in job.runs; empty: the name of this file"));
  keys.push_back(
      text("job", "device", "\"cpu\"", "device of the model: cpu, cuda, cuda:0 or another device of libtorch"));
  keys.push_back(
      path("job", "device_library", "\"\"", "library with libtorch's backend for job.device; empty: part of libtorch"));
  keys.push_back(flag("job", "trace", "false", "write a timeline of each rank to the run folder, for Perfetto"));
  keys.push_back(path("job", "runs", "\"runs\"", "folder that contains the run folders"));
}

void add_train(std::vector<ConfigKey>& keys) {
  keys.push_back(integer("train", "steps", "100", 0, kMax, "optimizer steps to train"));
  keys.push_back(integer("train", "seed", "0", 0, kInf, "seed of weights, batches and dropout"));
  keys.push_back(text("train", "dtype", "\"fp32\"",
                      "dtype of weights and activations; masters and optimizer states stay fp32",
                      {"fp32", "bf16", "fp16"}));
  keys.push_back(text("train", "param_dtype", "\"convert\"",
                      "parameters that are neither fp32 nor train.dtype, such as double ones: convert and report "
                      "them, or reject the model",
                      {"convert", "reject"}));
  keys.push_back(integer("train", "global_batch", "0", 0, kMax,
                         "samples per step; 0: micro_batch x gradient_accumulation x ranks"));
  keys.push_back(
      integer("train", "micro_batch", "0", 0, kMax, "samples per backward and rank; 0: derived from the other two"));
  keys.push_back(integer("train", "gradient_accumulation", "0", 0, kMax,
                         "micro-batches per step and rank; 0: derived from the other two"));
  keys.push_back(real("train", "gradient_clipping", "0.0", 0, kInf, "maximum global gradient norm; 0: no clipping"));
  keys.push_back(text("train", "nonfinite", "\"skip\"",
                      "a step with non-finite gradients: skip it, or stop the job; stop allows the update of states on "
                      "tiers to begin during backward",
                      {"skip", "stop"}));
  keys.push_back(integer("train", "max_skipped_steps", "50", 1, kMax,
                         "consecutive steps that may be skipped for non-finite gradients before the job fails"));
  keys.push_back(
      text("train", "buffers", "\"rank0\"",
           "the model's buffers in evaluation, in exported files and after a change of world size: rank 0's, the "
           "mean over ranks, or each rank's own; training always uses each rank's own",
           {"rank0", "mean", "per_rank"}));
  keys.push_back(
      {"train", "keep_fp32", kPatterns, "[]",
       "parameters of a 16-bit model that stay fp32, by name, such as norms: their operators need fp32 inputs"});
  keys.push_back(
      {"train", "cast_buffers", kPatterns, "[]",
       "floating-point buffers of the model that are converted to train.dtype, by name; the others keep their "
       "types"});
}

void add_gradients(std::vector<ConfigKey>& keys) {
  keys.push_back(
      flag("gradients", "overlap", "true",
           "reduce buckets during backward; false: after it (for models that call backward inside backward)"));
  keys.push_back(text("gradients", "reduce", "\"each_micro_step\"",
                      "each_micro_step: reduce after every micro-step; last_micro_step: accumulate on each rank, then "
                      "reduce once: less "
                      "communication, different rounding",
                      {"each_micro_step", "last_micro_step"}));
  keys.push_back(text("gradients", "dtype", "\"fp32\"", "dtype of reduced gradients: sums over micro-batches and ranks",
                      {"fp32", "bf16"}));
  keys.push_back(text(
      "gradients", "reduce_dtype", "\"auto\"",
      "dtype in which gradients are communicated; auto: the weights' dtype, but gradients.dtype if that is bf16 or if "
      "gradients.reduce is last_micro_step",
      {"auto", "fp32", "bf16", "fp16"}));
}

void add_memory(std::vector<ConfigKey>& keys) {
  ConfigKey budget{"memory", "device_budget", ZR_KEY_BYTES, "\"0B\"",
                   "limit of device memory per rank, activations included; with job.device, of the memory of that "
                   "device; 0: no limit"};
  budget.min = 0;
  keys.push_back(budget);
  budget.name = "host_budget";
  budget.meaning =
      "limit of host memory for all ranks of a node together, in addition to device memory: tiers, staging buffers, "
      "copies for checkpoints; 0: no limit";
  keys.push_back(budget);
}

void add_timeout(std::vector<ConfigKey>& keys) {
  ConfigKey timeout{"communicator", "timeout", ZR_KEY_DURATION, "\"5min\"",
                    "longest wait of a rank for its peers; a longer wait is reported as a hang"};
  timeout.min = 0.001;
  timeout.max = kLongest;
  keys.push_back(timeout);
}

void add_inexact_collectives(std::vector<ConfigKey>& keys) {
  keys.push_back(
      flag("communicator", "exact", "true",
           "false: sums of gradients may add the ranks of each host first, which saves bytes between hosts"));
  keys.push_back(text("communicator", "gradients", "\"exact\"",
                      "gradients between hosts: exact, or rounded to integers of 8 or 4 bits with a scale per block",
                      {"exact", "int8", "int4"}));
  keys.push_back(text("communicator", "weights", "\"exact\"",
                      "sharded weights between hosts, for forward and backward: exact, or rounded to 8 bits",
                      {"exact", "int8"}));
}

// In the order in which keys are validated and listed.
std::vector<ConfigKey> make_host_keys() {
  std::vector<ConfigKey> keys;
  add_roles(keys);
  add_job(keys);
  add_train(keys);
  add_gradients(keys);
  add_loss_scale(keys);
  add_memory(keys);
  keys.push_back(real("optimizer", "lr", "1e-3", 0, kInf, "learning rate; the full rate of the schedule"));
  add_schedules(keys);
  keys.push_back(integer("eval", "every", "0", 0, kMax, "steps between validations; 0: never"));
  keys.push_back(flag("communicator", "share_weights", "true",
                      "ranks of a node share one copy of the weights, if strategy and communicator support it"));
  add_inexact_collectives(keys);
  add_checkpoint(keys);
  add_offload(keys);
  add_timeout(keys);
  return keys;
}

}  // namespace

const std::vector<ConfigKey>& host_keys() {
  static const auto* keys = new std::vector<ConfigKey>(make_host_keys());  // never destroyed
  return *keys;
}

std::string_view renamed(std::string_view path, std::string_view value) {
  static constexpr RenamedKey kRenamed[]{
      {"train.clip", "", "train.gradient_clipping"},       {"train.accumulation", "", "train.gradient_accumulation"},
      {"train.max_skips", "", "train.max_skipped_steps"},  {"communicator.alias", "", "communicator.share_weights"},
      {"offload.fraction", "", "offload.device_fraction"}, {"gradients.reduce", "each", "each_micro_step"},
      {"gradients.reduce", "last", "last_micro_step"},
  };
  for (const RenamedKey& rename : kRenamed)
    if (rename.path == path && rename.old_value == value) return rename.now;
  return "";
}

const std::vector<std::string>& roles() {
  static const auto* names = new std::vector<std::string>{"strategy", "optimizer", "communicator"};
  return *names;  // never destroyed
}

namespace {
PathKind path_kind_by_name(const std::string& name) {
  const auto is = [&](const std::string& word) { return name == word || name.ends_with("_" + word); };
  return is("path") ? PathKind::list : is("library") ? PathKind::name_or_path : PathKind::none;
}
}  // namespace

std::vector<ConfigKey> keys_of(const zr_key* const* keys, uint32_t n, const std::string& table) {
  std::vector<ConfigKey> config_keys;
  for (uint32_t i = 0; i < n; ++i) {
    const zr_key& from = *keys[i];
    ConfigKey key{table,    from.name, from.type, from.def ? from.def : "", from.meaning ? from.meaning : "",
                  from.min, from.max};
    key.per_group = from.flags & ZR_KEY_PER_GROUP;
    if (key.type == ZR_KEY_STRING && !from.choices) key.path_kind = path_kind_by_name(key.name);
    for (std::string_view rest = from.choices ? from.choices : ""; !rest.empty();) {
      const auto bar = rest.find('|');
      key.choices.emplace_back(rest.substr(0, bar));
      rest = bar == rest.npos ? std::string_view() : rest.substr(bar + 1);
    }
    config_keys.push_back(std::move(key));
  }
  return config_keys;
}

std::string_view type_text(uint32_t type) {
  switch (type) {
    case ZR_KEY_BOOL: return "boolean";
    case ZR_KEY_INT: return "integer";
    case ZR_KEY_FLOAT: return "number";
    case ZR_KEY_STRING: return "string";
    case ZR_KEY_BYTES: return "size";
    case ZR_KEY_DURATION: return "duration";
    case ZR_KEY_FLOATS: return "numbers";
    case kPatterns: return "name patterns";
    default: return "";
  }
}

std::string_view type_text(const ConfigKey& key) {
  if (key.path_kind == PathKind::list) return "paths";
  return key.path_kind == PathKind::path || key.path_kind == PathKind::program ? "path" : type_text(key.type);
}

std::string range_text(const ConfigKey& key) {
  if (!key.choices.empty()) {
    std::string list;
    for (const auto& choice : key.choices) list += (list.empty() ? "" : "|") + choice;
    return list;
  }
  const auto bound = [&](double value) {
    if (key.type == ZR_KEY_BYTES) return bytes_text(static_cast<int64_t>(value));
    if (key.type == ZR_KEY_DURATION) return value >= 86400 ? shortest(value / 86400) + " d" : shortest(value) + " s";
    return shortest(value);
  };
  const bool low = std::isfinite(key.min), high = std::isfinite(key.max);
  if (low && high) return fmt::format("{} to {}", bound(key.min), bound(key.max));
  if (low) return "at least " + bound(key.min);
  return high ? "at most " + bound(key.max) : "";
}

std::string declaration_problem(const ConfigKey& key) {
  if (key.name.empty() || key.name.find_first_of(". \t\"'[]=#") != std::string::npos)
    return fmt::format("the key's name '{}' is not a bare TOML key", key.name);
  if (type_text(key.type).empty()) return fmt::format("the key '{}' has the unknown type {}", key.path(), key.type);
  if (key.meaning.empty() || key.meaning.find('\n') != std::string::npos)
    return fmt::format("the key '{}' needs a meaning of exactly one line", key.path());
  if (!(key.min <= key.max)) return fmt::format("the key '{}' has an empty range", key.path());
  if (key.def.empty() || key.def[0] == '@') return "";
  const std::string problem = default_value(key).problem;
  return problem.empty() ? "" : fmt::format("the default of key '{}': {}", key.path(), problem);
}

}  // namespace zr::host::config
