#include <cmath>

#include "base/failure.hpp"
#include "base/text.hpp"
#include "config/key.hpp"
#include "config/value.hpp"

namespace zr::host {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kMost = 2147483647;       // of what is counted: steps, samples, micro-batches
constexpr double kMostRanks = 1024;        // that one launcher starts
constexpr double kLongest = 30 * 86400.0;  // seconds

Key flag(std::string table, std::string name, std::string def, std::string meaning) {
  return {std::move(table), std::move(name), ZR_KEY_BOOL, std::move(def), std::move(meaning)};
}
Key whole(std::string table, std::string name, std::string def, double min, double max, std::string meaning) {
  return {std::move(table), std::move(name), ZR_KEY_INT, std::move(def), std::move(meaning), min, max};
}
Key real(std::string table, std::string name, std::string def, double min, double max, std::string meaning) {
  return {std::move(table), std::move(name), ZR_KEY_FLOAT, std::move(def), std::move(meaning), min, max};
}
Key text(std::string table, std::string name, std::string def, std::string meaning,
         std::vector<std::string> choices = {}) {
  Key key{std::move(table), std::move(name), ZR_KEY_STRING, std::move(def), std::move(meaning)};
  key.choices = std::move(choices);
  return key;
}

void add_schedules(std::vector<Key>& keys) {
  keys.push_back(
      text("schedule", "use", "\"constant\"", "how the learning rate moves; its keys stand in [schedule.<name>]",
           {"constant", "linear", "cosine", "one_cycle", "range_test", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}));
  for (const char* name : {"constant", "linear", "cosine"}) {
    const std::string table = std::string("schedule.") + name;
    keys.push_back(whole(table, "warmup", "0", 0, kMost, "steps of linear rise to the full rate"));
    if (table != "schedule.constant")
      keys.push_back(real(table, "final_ratio", "0.0", 0, 1, "part of the full rate that is left after the last step"));
  }
  keys.push_back(real("schedule.one_cycle", "rise", "0.3", 0, 1, "part of the steps that climb to the full rate"));
  keys.push_back(real("schedule.one_cycle", "start_ratio", "0.04", 0, 1, "part of the full rate at the first step"));
  keys.push_back(real("schedule.one_cycle", "final_ratio", "4e-6", 0, 1, "part of the full rate at the last step"));
  keys.push_back(real("schedule.range_test", "min_lr", "1e-3", 0, kInf, "rate of the first step"));
  keys.push_back(whole("schedule.range_test", "step_size", "2000", 1, kMost, "steps of one interval"));
  keys.push_back(real("schedule.range_test", "step_rate", "1.0", 0, kInf, "growth per interval, in units of min_lr"));
  keys.push_back(flag("schedule.range_test", "staircase", "false", "grow once an interval instead of each step"));
  for (const char* name : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}) {
    const std::string table = std::string("schedule.") + name;
    if (table != "schedule.WarmupLR")
      keys.push_back(whole(table, "total_num_steps", "@train.steps", 1, kMost, "step at which the decay ends"));
    if (table != "schedule.WarmupCosineLR") {
      keys.push_back(real(table, "warmup_min_lr", "0.0", 0, kInf, "rate before the warm-up"));
      keys.push_back(real(table, "warmup_max_lr", "@optimizer.lr", 0, kInf, "rate after the warm-up"));
    } else {
      keys.push_back(real(table, "warmup_min_ratio", "0.0", 0, 1, "part of the full rate at which the warm-up begins"));
      keys.push_back(real(table, "cos_min_ratio", "1e-4", 0, 1, "part of the full rate at which the cosine ends"));
    }
    keys.push_back(whole(table, "warmup_num_steps", "1000", 1, kMost, "steps of the warm-up"));
    keys.push_back(text(table, "warmup_type", "\"log\"", "shape of the warm-up", {"log", "linear"}));
  }
}

// The reference system's names, defaults and meaning.
void add_loss_scale(std::vector<Key>& keys) {
  keys.push_back(real("fp16", "loss_scale", "0.0", 0, kInf, "what a loss is multiplied by; 0: adjusted as below"));
  keys.push_back(whole("fp16", "initial_scale_power", "16", 0, 64, "the scale begins at two to this power"));
  keys.push_back(whole("fp16", "loss_scale_window", "1000", 1, kMost, "good steps behind a step that doubles it"));
  keys.push_back(whole("fp16", "hysteresis", "2", 1, kMost, "how many steps must overflow until it is halved"));
  keys.push_back(flag("fp16", "consecutive_hysteresis", "false",
                      "a good step makes hysteresis count anew; false: only one that doubles the scale"));
  keys.push_back(real("fp16", "min_loss_scale", "1.0", 0, kInf, "the scale is not halved below this"));
}

void add_checkpoint(std::vector<Key>& keys) {
  keys.push_back(text("checkpoint", "dir", "\"\"", "folder of this job's checkpoints, from where it is started"));
  keys.push_back(whole("checkpoint", "every", "0", 0, kMost, "steps between checkpoints; 0: where the program saves"));
  keys.push_back(whole("checkpoint", "keep", "0", 0, kMost, "newest checkpoints that stay in the folder; 0: all"));
  keys.push_back(flag("checkpoint", "async", "false", "write in the background, from a copy of this rank's part"));
  keys.push_back(text("checkpoint", "on_signal", "\"end\"",
                      "what SIGTERM and SIGINT do; save: the step is ended and saved, then the job ends in order",
                      {"end", "save"}));
  keys.push_back(
      flag("checkpoint", "resume", "false", "begin with the newest checkpoint of the folder, if there is one"));
  keys.push_back(flag("checkpoint", "fallback", "false",
                      "a checkpoint that is damaged is passed over for the one before it, instead of refused"));
  keys.push_back(text("checkpoint", "init", "\"\"",
                      "weights to begin with: a checkpoint, a safetensors file, or a folder of those with an index"));
  keys.push_back(flag("checkpoint", "strict", "true", "refuse what does not fit the model; false: take what does"));
  keys.push_back(
      flag("checkpoint", "convert", "false", "round weights of another type, from the fp32 masters if they are there"));
}

void add_offload(std::vector<Key>& keys) {
  const std::string where = ": device, auto (what the budgets have no room for, along offload.tiers), or a tier";
  keys.push_back(text("offload", "optimizer", "\"device\"", "where fp32 masters and optimizer states stand" + where));
  keys.push_back(text("offload", "gradients", "\"device\"", "where a step's sums of gradients stand" + where));
  keys.push_back(text("offload", "parameters", "\"device\"", "where sharded weights stand between uses" + where));
  keys.push_back(
      text("offload", "activations", "\"device\"",
           "where what forward keeps for backward stands: device, auto (along offload.tiers, where as much as was "
           "measured has no room), or a tier"));
  Key least{"offload", "activation_bytes", ZR_KEY_BYTES, "\"64KiB\"", "smaller activations stay on the device"};
  least.min = 1;
  keys.push_back(least);
  keys.push_back(real("offload", "fraction", "0.0", 0, 1, "part of the optimizer's states that stays on the device"));
  keys.push_back(text("offload", "tiers", "\"" ZR_DEFAULT_TIERS "\"",
                      "what auto fills behind the device, in order; behind the first only those with a table here"));
}

std::vector<Key> make_host_keys() {
  std::vector<Key> keys;
  keys.push_back(
      text("", "strategy", "\"" ZR_DEFAULT_STRATEGY "\"", "who owns which part of weights, gradients and states"));
  keys.push_back(text("", "optimizer", "\"" ZR_DEFAULT_OPTIMIZER "\"", "the arithmetic of an update"));
  keys.push_back(text("", "communicator", "\"" ZR_DEFAULT_COMMUNICATOR "\"", "how the ranks exchange buffers"));
  keys.push_back(
      text("job", "program", "\"\"", "the trainer: an executable beside this file, in bin, or an absolute path"));
  keys.push_back(whole("job", "ranks", "1", 1, kMostRanks, "processes that share the work"));
  keys.push_back(whole("job", "threads", "0", 0, 1024, "threads of a rank; 0: the cores shared evenly"));
  keys.push_back(text("job", "name", "\"\"", "folder of the run below job.runs; empty: this file's name"));
  keys.push_back(flag("job", "trace", "false", "what each rank did when, in its run folder, for Perfetto"));
  keys.push_back(text("job", "runs", "\"runs\"", "folder that keeps the runs, from where the job is started"));
  keys.push_back(whole("train", "steps", "100", 0, kMost, "updates of the weights"));
  keys.push_back(whole("train", "seed", "0", 0, kInf, "of weights, batches and dropout"));
  keys.push_back(text("train", "dtype", "\"fp32\"", "of weights and activations; masters and states stay fp32",
                      {"fp32", "bf16", "fp16"}));
  keys.push_back(text("train", "param_dtype", "\"convert\"",
                      "parameters that are neither fp32 nor train.dtype, such as double ones: convert and report "
                      "them, or reject the model",
                      {"convert", "reject"}));
  keys.push_back(
      whole("train", "global_batch", "0", 0, kMost, "samples a step; 0: micro_batch x accumulation x ranks"));
  keys.push_back(
      whole("train", "micro_batch", "0", 0, kMost, "samples of one backward on one rank; 0: from the other two"));
  keys.push_back(
      whole("train", "accumulation", "0", 0, kMost, "micro-batches a step on each rank; 0: from the other two"));
  keys.push_back(real("train", "clip", "0.0", 0, kInf, "largest global gradient norm; 0: no clipping"));
  keys.push_back(whole("train", "max_skips", "50", 1, kMost,
                       "steps in a row that gradients which are not finite may skip; then the job stops"));
  keys.push_back(text("train", "buffers", "\"rank0\"",
                      "the model's buffers in evaluation, exported files and on other numbers of ranks: rank 0's, the "
                      "mean over ranks, or each rank's own; training always keeps each rank's own",
                      {"rank0", "mean", "per_rank"}));
  keys.push_back(flag("gradients", "overlap", "true",
                      "buckets leave during backward; false: after it (models that run backward in backward)"));
  keys.push_back(text("gradients", "reduce", "\"each\"",
                      "each: after every micro-step; last: added up on each rank first, less wire and other roundings",
                      {"each", "last"}));
  keys.push_back(text("gradients", "dtype", "\"fp32\"", "of the sums over micro-batches and ranks", {"fp32", "bf16"}));
  keys.push_back(text("gradients", "reduce_dtype", "\"auto\"",
                      "gradients are rounded to it before they travel; auto: the weights' own, or a narrower sum's",
                      {"auto", "fp32", "bf16", "fp16"}));
  add_loss_scale(keys);
  Key budget{"memory", "device_budget", ZR_KEY_BYTES, "\"0B\"",
             "the most a rank may hold, activations included; 0: no limit"};
  budget.min = 0;
  keys.push_back(budget);
  budget.name = "host_budget";
  budget.meaning =
      "the most a host's ranks may take of host memory beside the device's, together: tiers, staging, "
      "copies for checkpoints; 0: no limit";
  keys.push_back(budget);
  keys.push_back(real("optimizer", "lr", "1e-3", 0, kInf, "learning rate, the schedule's full rate"));
  add_schedules(keys);
  keys.push_back(whole("eval", "every", "0", 0, kMost, "steps between validations; 0: never"));
  keys.push_back(flag("communicator", "alias", "true",
                      "ranks of one host have one copy of the weights, where strategy and communicator can"));
  add_checkpoint(keys);
  add_offload(keys);
  Key timeout{"communicator", "timeout", ZR_KEY_DURATION, "\"5min\"",
              "a rank that waits longer for its peers reports a hang"};
  timeout.min = 0.001;
  timeout.max = kLongest;
  keys.push_back(timeout);
  return keys;
}

}  // namespace

const std::vector<Key>& host_keys() {
  static const std::vector<Key> keys = make_host_keys();
  return keys;
}

const std::vector<std::string>& roles() {
  static const std::vector<std::string> names{"strategy", "optimizer", "communicator"};
  return names;
}

std::vector<Key> keys_of(const zr_key* const* keys, uint32_t n, const std::string& table) {
  std::vector<Key> all;
  for (uint32_t i = 0; i < n; ++i) {
    const zr_key& from = *keys[i];
    Key key{table,    from.name, from.type, from.def ? from.def : "", from.meaning ? from.meaning : "",
            from.min, from.max};
    key.per_group = from.flags & ZR_KEY_PER_GROUP;
    for (std::string_view rest = from.choices ? from.choices : ""; !rest.empty();) {
      const auto bar = rest.find('|');
      key.choices.emplace_back(rest.substr(0, bar));
      rest = bar == rest.npos ? std::string_view() : rest.substr(bar + 1);
    }
    all.push_back(std::move(key));
  }
  return all;
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
    default: return "";
  }
}

std::string range_text(const Key& key) {
  if (!key.choices.empty()) {
    std::string all;
    for (const auto& choice : key.choices) all += (all.empty() ? "" : "|") + choice;
    return all;
  }
  const auto bound = [&](double value) {
    if (key.type == ZR_KEY_BYTES) return bytes_text(static_cast<int64_t>(value));
    if (key.type == ZR_KEY_DURATION) return value >= 86400 ? shortest(value / 86400) + " d" : shortest(value) + " s";
    return shortest(value);
  };
  const bool low = std::isfinite(key.min), high = std::isfinite(key.max);
  if (low && high) return bound(key.min) + " to " + bound(key.max);
  if (low) return "at least " + bound(key.min);
  return high ? "at most " + bound(key.max) : "";
}

std::string declaration_problem(const Key& key) {
  if (key.name.empty() || key.name.find_first_of(". \t\"'[]=#") != std::string::npos)
    return "the key's name '" + key.name + "' is no bare TOML key";
  if (type_text(key.type).empty())
    return "the key '" + key.path() + "' has the unknown type " + std::to_string(key.type);
  if (key.meaning.empty() || key.meaning.find('\n') != std::string::npos)
    return "the key '" + key.path() + "' does not say its meaning in one line";
  if (!(key.min <= key.max)) return "the key '" + key.path() + "' has an empty range";
  if (key.def.empty() || key.def[0] == '@') return "";
  const std::string problem = default_value(key).problem;
  return problem.empty() ? "" : "the default of key '" + key.path() + "': " + problem;
}

}  // namespace zr::host
