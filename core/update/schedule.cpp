#include "update/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <variant>

namespace zr::host::update {

namespace {

using std::numbers::pi;

// From 1/(W+1) at step 0 to 1 at step W.
double warmup(int64_t step, int64_t steps) { return step < steps ? double(step + 1) / double(steps + 1) : 1.0; }

// Progress from the end of the warm-up to the end of the job: 0 at step W, 1 from step T on.
double progress(int64_t step, int64_t warm, int64_t total) {
  return step >= total ? 1.0 : double(step - warm) / double(total - warm);
}

double cosine_between(double from, double to, double part) { return to + (from - to) * (1 + std::cos(pi * part)) / 2; }

// DeepSpeed's warm-up: its counter is one behind the index of the update, and the warm-up takes at least 2 steps.
struct DeepSpeedWarmup {
  int64_t count, steps;
  bool over() const { return count >= steps; }
  double part(config::WarmupType type) const {
    return type == config::WarmupType::log ? std::log(double(count + 1)) / std::log(double(steps))
                                           : double(count) / double(steps);
  }
};
DeepSpeedWarmup deepspeed_warmup(int64_t step, int64_t warmup_num_steps) {
  return {step - 1, std::max<int64_t>(2, warmup_num_steps)};
}

// The rate of one step under each schedule.
struct Rate {
  int64_t step, total;  // total: train.steps
  double lr;            // optimizer.lr

  double operator()(const config::ConstantSchedule& of) const { return lr * warmup(step, of.warmup_steps); }

  double operator()(const config::DecaySchedule& of) const {
    const int64_t warm = of.warmup_steps;
    if (step < warm) return lr * warmup(step, warm);
    const double final_ratio = of.final_ratio, part = progress(step, warm, total);
    return lr * (of.cosine ? cosine_between(1, final_ratio, part) : 1 + (final_ratio - 1) * part);
  }

  // Two cosine halves: up to the peak at step rise * T - 1, then down until step T - 1.
  double operator()(const config::OneCycleSchedule& of) const {
    const double start = lr * of.start_ratio, end = lr * of.final_ratio;
    const double peak = std::max(0.0, of.rise * double(total) - 1), last = double(total) - 1;
    const double at = double(step);
    if (at < peak) return cosine_between(start, lr, at / peak);
    if (last <= peak) return at > last ? end : lr;
    return cosine_between(lr, end, std::min(1.0, (at - peak) / (last - peak)));
  }

  double operator()(const config::RangeTestSchedule& of) const {
    const double interval = double(step) / double(of.step_size);
    return of.min_lr * (1 + of.step_rate * (of.staircase ? std::floor(interval) : interval));
  }

  double operator()(const config::WarmupSchedule& of) const {
    const DeepSpeedWarmup warm = deepspeed_warmup(step, of.warmup_num_steps);
    const double low = of.warmup_min_lr, high = of.warmup_max_lr;
    if (warm.count < 0) return low;
    double part = 1;
    if (!warm.over()) {
      part = warm.part(of.warmup_type);
    } else if (of.decays) {
      const int64_t end = of.total_num_steps;
      part = std::max(0.0, double(end - warm.count) / std::max(1.0, double(end - warm.steps)));
    }
    return low + (high - low) * part;
  }

  double operator()(const config::WarmupCosineSchedule& of) const {
    const DeepSpeedWarmup warm = deepspeed_warmup(step, of.warmup_num_steps);
    if (warm.count < 0) return 0;
    if (!warm.over()) {
      const double min_ratio = of.warmup_min_ratio;
      return lr * (min_ratio + (1 - min_ratio) * warm.part(of.warmup_type));
    }
    const double steps = double(std::max<int64_t>(1, of.total_num_steps - warm.steps));
    const double part = std::min(1.0, double(warm.count - warm.steps + 1) / steps);
    return lr * cosine_between(1, of.cos_min_ratio, part);
  }
};

}  // namespace

double learning_rate(const config::JobConfig& config, int64_t step) {
  return std::visit(Rate{step, config.train().steps, config.optimizer().lr}, config.schedule());
}

}  // namespace zr::host::update
