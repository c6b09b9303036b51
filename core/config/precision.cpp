#include "config/precision.hpp"

#include <fmt/format.h>

#include <cmath>

#include "base/dtype.hpp"
#include "base/limits.hpp"
#include "base/text.hpp"

namespace zr::host::config {

Precision precision_of(const TrainConfig& train, const GradientsConfig& gradients) {
  // A reduction to fp32 upcasts; a narrower reduction needs gradients of its own dtype, as local accumulation does.
  const bool accumulates_locally = gradients.reduce == GradientReduction::last_micro_step;
  const zr_dtype automatic = gradients.dtype == ZR_F32 && !accumulates_locally ? train.dtype : gradients.dtype;
  const auto communicated = [&](zr_dtype if_automatic) {
    return gradients.reduce_dtype == ZR_NONE ? if_automatic : gradients.reduce_dtype.value;
  };
  return {train.dtype, communicated(automatic), gradients.dtype, communicated(gradients.dtype)};
}

namespace {
bool is_power_of_two(double value) {
  int exponent;
  return std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
}

std::string not_a_power_of_two(double value, const std::string& or_zero) {
  std::string text = fmt::format("expected {}a power of two up to 2^64, found {}", or_zero, shortest(value));
  if (value > 0 && value < kMaxLossScale) {
    const double below = std::exp2(std::floor(std::log2(value)));
    text += fmt::format("; the nearest are {} and {}", shortest(below), shortest(2 * below));
  }
  return text;
}
}  // namespace

std::vector<PrecisionProblem> precision_problems(const HostConfig& config) {
  std::vector<PrecisionProblem> problems;
  const auto add = [&](const auto& setting, const std::string& problem) {
    problems.push_back({setting.origin, fmt::format("{}: {}", setting.key, problem)});
  };
  const Precision& types = config.precision;
  const GradientsConfig& gradients = config.gradients;
  const std::string sums(name_of(types.reduced_gradients));
  if (types.gradients != types.reduced_gradients && gradients.reduce == GradientReduction::last_micro_step) {
    add(gradients.reduce_dtype,
        fmt::format(
            "is {}, but with gradients.reduce = \"last_micro_step\" ({}) each rank accumulates gradients in {} before "
            "it communicates them; set gradients.reduce_dtype = \"auto\", or gradients.reduce = \"each_micro_step\"",
            gradients.reduce_dtype.written, gradients.reduce.origin.text(), sums));
  } else if (types.reduced_gradients != ZR_F32 && types.gradients != types.reduced_gradients) {
    add(gradients.reduce_dtype,
        fmt::format("is {}, but gradients.dtype is \"{}\" ({}), and reduced gradients in {} need gradients that are "
                    "communicated in {}; set gradients.reduce_dtype = \"auto\", or gradients.dtype = \"fp32\"",
                    gradients.reduce_dtype.written, sums, gradients.dtype.origin.text(), sums, sums));
  }
  const Fp16Config& fp16 = config.fp16;
  const double fixed = fp16.loss_scale, minimum = fp16.min_loss_scale;
  const auto allowed = [](double value) { return is_power_of_two(value) && value <= kMaxLossScale; };
  if (types.weights == ZR_F16 && fixed == 0 && config.train.nonfinite == NonFiniteRule::stop)
    add(config.train.nonfinite, fmt::format("is \"stop\", but the dynamic loss scale of train.dtype = \"fp16\" ({}) "
                                            "skips steps; set train.nonfinite = \"skip\", or a fixed fp16.loss_scale",
                                            config.train.dtype.origin.text()));
  if (fixed != 0 && !allowed(fixed)) add(fp16.loss_scale, not_a_power_of_two(fixed, "0 or "));
  if (!allowed(minimum)) add(fp16.min_loss_scale, not_a_power_of_two(minimum, ""));
  const int64_t power = fp16.initial_scale_power;
  if (minimum > std::exp2(power))
    add(fp16.min_loss_scale, fmt::format("{} is above the initial loss scale, 2^{} (fp16.initial_scale_power, {}); "
                                         "lower this one or raise fp16.initial_scale_power",
                                         shortest(minimum), power, fp16.initial_scale_power.origin.text()));
  return problems;
}

}  // namespace zr::host::config
