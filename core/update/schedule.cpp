#include "update/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/failure.hpp"

namespace zr::host {

namespace {

using std::numbers::pi;

// The keys of one schedule: [schedule.<name>].
struct Table {
  const JobConfig& config;
  std::string prefix;
  double number(const char* key) const { return config.number(prefix + key); }
  int64_t integer(const char* key) const { return config.integer(prefix + key); }
  bool is(const char* key, std::string_view text) const { return config.text(prefix + key) == text; }
};

// From 1/(W+1) at step 0 to 1 at step W.
double warmup(int64_t step, int64_t steps) { return step < steps ? double(step + 1) / double(steps + 1) : 1.0; }

// Progress from the end of the warm-up to the end of the job: 0 at step W, 1 from step T on.
double progress(int64_t step, int64_t warm, int64_t total) {
  return step >= total ? 1.0 : double(step - warm) / double(total - warm);
}

double cosine_between(double from, double to, double part) { return to + (from - to) * (1 + std::cos(pi * part)) / 2; }

double decayed(const Table& keys, double lr, int64_t step, int64_t total, bool cosine) {
  const int64_t warm = keys.integer("warmup");
  if (step < warm) return lr * warmup(step, warm);
  const double final_ratio = keys.number("final_ratio"), part = progress(step, warm, total);
  return lr * (cosine ? cosine_between(1, final_ratio, part) : 1 + (final_ratio - 1) * part);
}

// Two cosine halves: up to the peak at step rise * T - 1, then down until step T - 1.
double one_cycle(const Table& keys, double lr, int64_t step, int64_t total) {
  const double start = lr * keys.number("start_ratio"), end = lr * keys.number("final_ratio");
  const double peak = std::max(0.0, keys.number("rise") * double(total) - 1), last = double(total) - 1;
  const double at = double(step);
  if (at < peak) return cosine_between(start, lr, at / peak);
  if (last <= peak) return at > last ? end : lr;
  return cosine_between(lr, end, std::min(1.0, (at - peak) / (last - peak)));
}

double range_test(const Table& keys, int64_t step) {
  const double interval = double(step) / double(keys.integer("step_size"));
  const bool stairs = keys.config.boolean(keys.prefix + "staircase");
  return keys.number("min_lr") * (1 + keys.number("step_rate") * (stairs ? std::floor(interval) : interval));
}

// DeepSpeed's warm-up: its counter is one behind the index of the update, and the warm-up takes at least 2 steps.
struct DeepSpeedWarmup {
  int64_t count, steps;
  bool over() const { return count >= steps; }
  double part(bool logarithmic) const {
    return logarithmic ? std::log(double(count + 1)) / std::log(double(steps)) : double(count) / double(steps);
  }
};
DeepSpeedWarmup deepspeed_warmup(const Table& keys, int64_t step) {
  return {step - 1, std::max<int64_t>(2, keys.integer("warmup_num_steps"))};
}

double warmup_lr(const Table& keys, int64_t step, bool decay) {
  const DeepSpeedWarmup warm = deepspeed_warmup(keys, step);
  const double low = keys.number("warmup_min_lr"), high = keys.number("warmup_max_lr");
  if (warm.count < 0) return low;
  double part = 1;
  if (!warm.over()) {
    part = warm.part(keys.is("warmup_type", "log"));
  } else if (decay) {
    const int64_t total = keys.integer("total_num_steps");
    part = std::max(0.0, double(total - warm.count) / std::max(1.0, double(total - warm.steps)));
  }
  return low + (high - low) * part;
}

double warmup_cosine_lr(const Table& keys, double lr, int64_t step) {
  const DeepSpeedWarmup warm = deepspeed_warmup(keys, step);
  if (warm.count < 0) return 0;
  if (!warm.over()) {
    const double least = keys.number("warmup_min_ratio");
    return lr * (least + (1 - least) * warm.part(keys.is("warmup_type", "log")));
  }
  const double total = double(std::max<int64_t>(1, keys.integer("total_num_steps") - warm.steps));
  const double part = std::min(1.0, double(warm.count - warm.steps + 1) / total);
  return lr * cosine_between(1, keys.number("cos_min_ratio"), part);
}

}  // namespace

double learning_rate(const JobConfig& config, int64_t step) {
  const std::string& name = config.text("schedule.use");
  const Table keys{config, "schedule." + name + "."};
  const double lr = config.number("optimizer.lr");
  const int64_t total = config.integer("train.steps");
  if (name == "constant") return lr * warmup(step, keys.integer("warmup"));
  if (name == "linear") return decayed(keys, lr, step, total, false);
  if (name == "cosine") return decayed(keys, lr, step, total, true);
  if (name == "one_cycle") return one_cycle(keys, lr, step, total);
  if (name == "range_test") return range_test(keys, step);
  if (name == "WarmupLR") return warmup_lr(keys, step, false);
  if (name == "WarmupDecayLR") return warmup_lr(keys, step, true);
  if (name == "WarmupCosineLR") return warmup_cosine_lr(keys, lr, step);
  fail_bug("unknown schedule '" + name + "'");
}

}  // namespace zr::host
