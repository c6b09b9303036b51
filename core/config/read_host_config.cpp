#include "config/read_host_config.hpp"

#include <fmt/format.h>

#include <sstream>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "config/key_reader.hpp"
#include "config/precision.hpp"

namespace zr::host::config {

namespace {

template <class T>
const T& as(const Entry& entry) {
  if (const T* value = std::get_if<T>(&entry.value)) return *value;
  fail_internal(fmt::format("the key '{}' of type {} does not fit the type of its field", entry.key.path(),
                            type_text(entry.key.type)));
}

template <class T>
struct Choice {
  std::string_view text;
  T value;
};

template <class T, std::size_t N>
T choice(const Entry& entry, const Choice<T> (&choices)[N]) {
  for (const Choice<T>& candidate : choices)
    if (candidate.text == as<std::string>(entry)) return candidate.value;
  fail_internal(fmt::format("the key '{}' has no value {}", entry.key.path(), entry.written));
}

void convert(const Entry& entry, bool& to) { to = as<bool>(entry); }
void convert(const Entry& entry, int64_t& to) { to = as<int64_t>(entry); }
void convert(const Entry& entry, int& to) {
  to = static_cast<int>(as<int64_t>(entry));
  if (to != as<int64_t>(entry))
    fail_internal(fmt::format("the key '{}' does not fit an int: {}", entry.key.path(), entry.written));
}
void convert(const Entry& entry, double& to) { to = as<double>(entry); }
void convert(const Entry& entry, std::string& to) { to = as<std::string>(entry); }
void convert(const Entry& entry, std::vector<std::string>& to) {
  if (entry.key.type == kPatterns) return void(to = as<std::vector<std::string>>(entry));
  std::istringstream words(as<std::string>(entry));
  for (std::string word; words >> word;) to.push_back(word);
}
void convert(const Entry& entry, std::chrono::milliseconds& to) {
  to = std::chrono::milliseconds(static_cast<int64_t>(as<double>(entry) * 1e3));
}
void convert(const Entry& entry, TierChoice& to) { to.text = as<std::string>(entry); }
void convert(const Entry& entry, ParamDtypeRule& to) {
  to = choice<ParamDtypeRule>(entry, {{"convert", ParamDtypeRule::convert}, {"reject", ParamDtypeRule::reject}});
}
void convert(const Entry& entry, ValueForm& to) {
  to = choice<ValueForm>(entry, {{"exact", ValueForm::exact}, {"int8", ValueForm::int8}, {"int4", ValueForm::int4}});
}

void convert(const Entry& entry, SpeculateRule& to) {
  to = choice<SpeculateRule>(
      entry, {{"auto", SpeculateRule::automatic}, {"always", SpeculateRule::always}, {"never", SpeculateRule::never}});
}
void convert(const Entry& entry, NonFiniteRule& to) {
  to = choice<NonFiniteRule>(entry, {{"skip", NonFiniteRule::skip}, {"stop", NonFiniteRule::stop}});
}

void convert(const Entry& entry, BufferRule& to) {
  to = choice<BufferRule>(
      entry, {{"rank0", BufferRule::rank0}, {"mean", BufferRule::mean}, {"per_rank", BufferRule::per_rank}});
}
void convert(const Entry& entry, GradientReduction& to) {
  to = choice<GradientReduction>(entry, {{"each_micro_step", GradientReduction::each_micro_step},
                                         {"last_micro_step", GradientReduction::last_micro_step}});
}
void convert(const Entry& entry, OnSignal& to) {
  to = choice<OnSignal>(entry, {{"end", OnSignal::end}, {"save", OnSignal::save}});
}
void convert(const Entry& entry, WarmupType& to) {
  to = choice<WarmupType>(entry, {{"log", WarmupType::log}, {"linear", WarmupType::linear}});
}

// What a message needs to name a key.
template <class T>
Setting<T> without_value(const Entry& entry) {
  return {T{}, entry.key.path(), entry.written, entry.origin, entry.given_path};
}

// Reads the keys of one table.
class Table {
 public:
  Table(const KeyReader& keys, std::string name) : keys_(keys), name_(std::move(name)) {}
  template <class T>
  void read(const char* key, Setting<T>& to) const {
    to = setting_of<T>(keys_.entry(fmt::format("{}.{}", name_, key)));
  }
  void read_dtype(const char* key, Setting<zr_dtype>& to) const {
    const Entry& entry = keys_.entry(fmt::format("{}.{}", name_, key));
    to = without_value<zr_dtype>(entry);
    to.value = float_dtype_named(as<std::string>(entry));
    if (to == ZR_NONE && as<std::string>(entry) != "auto")
      fail_internal(fmt::format("the key '{}' has no value {}", entry.key.path(), entry.written));
  }

 private:
  const KeyReader& keys_;
  const std::string name_;
};

void read(const KeyReader& keys, RunConfig& to) {
  const Table table(keys, "job");
  table.read("program", to.program);
  table.read("ranks", to.ranks);
  table.read("threads", to.threads);
  table.read("name", to.name);
  table.read("device", to.device);
  table.read("device_library", to.device_library);
  table.read("trace", to.trace);
  table.read("runs", to.runs);
}

void read(const KeyReader& keys, TrainConfig& to) {
  const Table table(keys, "train");
  table.read("steps", to.steps);
  table.read("seed", to.seed);
  table.read_dtype("dtype", to.dtype);
  table.read("param_dtype", to.param_dtype);
  table.read("global_batch", to.global_batch);
  table.read("micro_batch", to.micro_batch);
  table.read("gradient_accumulation", to.gradient_accumulation);
  table.read("gradient_clipping", to.gradient_clipping);
  table.read("nonfinite", to.nonfinite);
  table.read("max_skipped_steps", to.max_skipped_steps);
  table.read("buffers", to.buffers);
  table.read("keep_fp32", to.keep_fp32);
  table.read("cast_buffers", to.cast_buffers);
}

void read(const KeyReader& keys, GradientsConfig& to) {
  const Table table(keys, "gradients");
  table.read("overlap", to.overlap);
  table.read("reduce", to.reduce);
  table.read_dtype("dtype", to.dtype);
  table.read_dtype("reduce_dtype", to.reduce_dtype);
}

void read(const KeyReader& keys, Fp16Config& to) {
  const Table table(keys, "fp16");
  table.read("loss_scale", to.loss_scale);
  table.read("initial_scale_power", to.initial_scale_power);
  table.read("loss_scale_window", to.loss_scale_window);
  table.read("hysteresis", to.hysteresis);
  table.read("consecutive_hysteresis", to.consecutive_hysteresis);
  table.read("min_loss_scale", to.min_loss_scale);
}

void read(const Table& table, ConstantSchedule& to) { table.read("warmup", to.warmup_steps); }
void read(const Table& table, DecaySchedule& to) {
  table.read("warmup", to.warmup_steps);
  table.read("final_ratio", to.final_ratio);
}
void read(const Table& table, OneCycleSchedule& to) {
  table.read("rise", to.rise);
  table.read("start_ratio", to.start_ratio);
  table.read("final_ratio", to.final_ratio);
}
void read(const Table& table, RangeTestSchedule& to) {
  table.read("min_lr", to.min_lr);
  table.read("step_size", to.step_size);
  table.read("step_rate", to.step_rate);
  table.read("staircase", to.staircase);
}
void read(const Table& table, WarmupSchedule& to) {
  table.read("warmup_min_lr", to.warmup_min_lr);
  table.read("warmup_max_lr", to.warmup_max_lr);
  table.read("warmup_num_steps", to.warmup_num_steps);
  table.read("warmup_type", to.warmup_type);
  if (to.decays) table.read("total_num_steps", to.total_num_steps);
}
void read(const Table& table, WarmupCosineSchedule& to) {
  table.read("warmup_min_ratio", to.warmup_min_ratio);
  table.read("cos_min_ratio", to.cos_min_ratio);
  table.read("warmup_num_steps", to.warmup_num_steps);
  table.read("warmup_type", to.warmup_type);
  table.read("total_num_steps", to.total_num_steps);
}

// The struct of the schedule with this name, without values.
ScheduleConfig empty_schedule(const std::string& name) {
  DecaySchedule cosine;
  cosine.cosine = true;
  WarmupSchedule decays;
  decays.decays = true;
  if (name == "constant") return ConstantSchedule{};
  if (name == "linear") return DecaySchedule{};
  if (name == "cosine") return cosine;
  if (name == "one_cycle") return OneCycleSchedule{};
  if (name == "range_test") return RangeTestSchedule{};
  if (name == "WarmupLR") return WarmupSchedule{};
  if (name == "WarmupDecayLR") return decays;
  if (name == "WarmupCosineLR") return WarmupCosineSchedule{};
  fail_internal(fmt::format("unknown schedule '{}'", name));
}

ScheduleConfig read_schedule(const KeyReader& keys) {
  const std::string& name = keys.text("schedule.use");
  ScheduleConfig schedule = empty_schedule(name);
  std::visit([table = Table(keys, "schedule." + name)](auto& to) { read(table, to); }, schedule);
  return schedule;
}

void read(const KeyReader& keys, CheckpointConfig& to) {
  const Table table(keys, "checkpoint");
  table.read("dir", to.dir);
  table.read("every", to.every);
  table.read("keep", to.keep);
  table.read("async", to.async);
  table.read("on_signal", to.on_signal);
  table.read("resume", to.resume);
  table.read("fallback", to.fallback);
  table.read("init", to.init);
  table.read("strict", to.strict);
  table.read("convert", to.convert);
}

void read(const KeyReader& keys, OffloadConfig& to) {
  const Table table(keys, "offload");
  table.read("optimizer", to.optimizer);
  table.read("gradients", to.gradients);
  table.read("parameters", to.parameters);
  table.read("activations", to.activations);
  table.read("overlap", to.overlap);
  table.read("speculate", to.speculate);
  table.read("activation_bytes", to.activation_bytes);
  table.read("device_fraction", to.device_fraction);
  table.read("tiers", to.tiers);
}

}  // namespace

template <class T>
Setting<T> setting_of(const Entry& entry) {
  Setting<T> setting = without_value<T>(entry);
  convert(entry, setting.value);
  return setting;
}

template Setting<int> setting_of(const Entry& entry);
template Setting<std::chrono::milliseconds> setting_of(const Entry& entry);
template Setting<std::string> setting_of(const Entry& entry);
template Setting<std::vector<std::string>> setting_of(const Entry& entry);
template Setting<TierChoice> setting_of(const Entry& entry);

HostConfig read_host_config(const JobConfig& config) {
  const KeyReader keys(config);
  HostConfig host;
  read(keys, host.job);
  read(keys, host.train);
  read(keys, host.gradients);
  host.precision = precision_of(host.train, host.gradients);
  read(keys, host.fp16);
  Table(keys, "memory").read("device_budget", host.memory.device_budget_bytes);
  Table(keys, "memory").read("host_budget", host.memory.host_budget_bytes);
  Table(keys, "optimizer").read("lr", host.optimizer.lr);
  host.schedule = read_schedule(keys);
  Table(keys, "eval").read("every", host.eval.every);
  Table(keys, "communicator").read("share_weights", host.communicator.share_weights);
  Table(keys, "communicator").read("exact", host.communicator.exact);
  Table(keys, "communicator").read("gradients", host.communicator.gradients);
  Table(keys, "communicator").read("weights", host.communicator.weights);
  Table(keys, "communicator").read("timeout", host.communicator.timeout);
  read(keys, host.checkpoint);
  read(keys, host.offload);
  return host;
}

}  // namespace zr::host::config
