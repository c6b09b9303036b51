#include "update/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace zr::host::update {

namespace {

double cosine_between(double from, double to, double part) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

// The part of the full rate during the rise: `start_ratio` at step `from`, 1 at step `warmup`.
double rise(const config::RiseConfig& of, int64_t step) {
  const int64_t from = of.warmup_from;
  if (step >= of.warmup) return 1;
  double part = 0;
  if (step > from && of.warmup_type == config::WarmupType::linear)
    part = double(step - from) / double(of.warmup - from);
  if (step > from && of.warmup_type == config::WarmupType::log)
    part = std::log(double(step - from + 1)) / std::log(double(of.warmup - from));
  return of.start_ratio + (1 - of.start_ratio) * std::min(1.0, part);
}

// How much of the fall is over: 0 until step decay_from, 1 from step decay_until on.
double fallen(const config::RiseAndFallConfig& of, int64_t step) {
  if (step >= of.decay_until) return 1;
  if (step <= of.decay_from) return 0;
  return double(step - of.decay_from) / double(of.decay_until - of.decay_from);
}

// Two cosine halves: up to the peak at step rise * T - 1, then down until step T - 1.
double one_cycle(const config::OneCycleConfig& of, double lr, int64_t step, int64_t total) {
  const double start = lr * of.start_ratio, end = lr * of.final_ratio;
  const double peak = std::max(0.0, of.rise * double(total) - 1), last = double(total) - 1;
  const double at = double(step);
  if (at < peak) return cosine_between(start, lr, at / peak);
  if (last <= peak) return at > last ? end : lr;
  return cosine_between(lr, end, std::min(1.0, (at - peak) / (last - peak)));
}

double range_test(const config::RangeTestConfig& of, int64_t step) {
  const double interval = double(step) / double(of.step_size);
  return of.min_lr * (1 + of.step_rate * (of.staircase ? std::floor(interval) : interval));
}

}  // namespace

double learning_rate(const config::JobConfig& config, int64_t step) {
  using Kind = config::ScheduleKind;
  const config::ScheduleConfig& of = config.schedule();
  const double lr = config.optimizer().lr;
  switch (of.use.value) {
    case Kind::constant: return lr * rise(of.constant, step);
    case Kind::linear:
      if (step < of.linear.warmup) return lr * rise(of.linear, step);
      return lr * (1 + (of.linear.final_ratio - 1) * fallen(of.linear, step));
    case Kind::cosine:
      if (step < of.cosine.warmup) return lr * rise(of.cosine, step);
      return lr * cosine_between(1, of.cosine.final_ratio, fallen(of.cosine, step));
    case Kind::one_cycle: return one_cycle(of.one_cycle, lr, step, config.train().steps);
    default: return range_test(of.range_test, step);
  }
}

}  // namespace zr::host::update
