#include "config/precision.hpp"

#include <cmath>

#include "base/dtype.hpp"
#include "base/text.hpp"

namespace zr::host::config {

Precision precision_of(const TrainConfig& train, const GradientsConfig& gradients) {
  // A reduction to fp32 upcasts; a narrower reduction needs gradients of its own dtype, as held gradients do.
  const bool held = gradients.reduce == GradientReduction::last_micro_step;
  const zr_dtype standard = gradients.dtype == ZR_F32 && !held ? train.dtype : gradients.dtype;
  return {train.dtype, gradients.reduce_dtype == ZR_NONE ? standard : gradients.reduce_dtype, gradients.dtype};
}

namespace {
bool is_power_of_two(double value) {
  int exponent;
  return std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
}

std::string not_a_power_of_two(double value, const std::string& or_zero) {
  std::string text = "expected " + or_zero + "a power of two up to 2^64, found " + shortest(value);
  if (value > 0 && value < kMaxLossScale) {
    const double below = std::exp2(std::floor(std::log2(value)));
    text += "; the nearest are " + shortest(below) + " and " + shortest(2 * below);
  }
  return text;
}
}  // namespace

std::vector<PrecisionProblem> precision_problems(const HostConfig& config) {
  std::vector<PrecisionProblem> problems;
  const auto add = [&](const auto& setting, const std::string& problem) {
    problems.push_back({setting.origin, setting.key + ": " + problem});
  };
  const Precision& types = config.precision;
  const GradientsConfig& gradients = config.gradients;
  const std::string sums(name_of(types.reduced_gradients));
  if (types.gradients != types.reduced_gradients && gradients.reduce == GradientReduction::last_micro_step) {
    add(gradients.reduce_dtype,
        "is " + gradients.reduce_dtype.written + ", but with gradients.reduce = \"last_micro_step\" (" +
            gradients.reduce.origin.text() + ") each rank accumulates gradients in " + sums +
            " before it communicates them; set gradients.reduce_dtype = \"auto\", or gradients.reduce = "
            "\"each_micro_step\"");
  } else if (types.reduced_gradients != ZR_F32 && types.gradients != types.reduced_gradients) {
    add(gradients.reduce_dtype, "is " + gradients.reduce_dtype.written + ", but gradients.dtype is \"" + sums + "\" (" +
                                    gradients.dtype.origin.text() + "), and reduced gradients in " + sums +
                                    " need gradients that are communicated in " + sums +
                                    "; set gradients.reduce_dtype = \"auto\", or gradients.dtype = \"fp32\"");
  }
  const Fp16Config& fp16 = config.fp16;
  const double fixed = fp16.loss_scale, least = fp16.min_loss_scale;
  const auto allowed = [](double value) { return is_power_of_two(value) && value <= kMaxLossScale; };
  if (fixed != 0 && !allowed(fixed)) add(fp16.loss_scale, not_a_power_of_two(fixed, "0 or "));
  if (!allowed(least)) add(fp16.min_loss_scale, not_a_power_of_two(least, ""));
  const int64_t power = fp16.initial_scale_power;
  if (least > std::exp2(power))
    add(fp16.min_loss_scale, shortest(least) + " is above the initial loss scale, 2^" + std::to_string(power) +
                                 " (fp16.initial_scale_power, " + fp16.initial_scale_power.origin.text() +
                                 "); lower this one or raise fp16.initial_scale_power");
  return problems;
}

}  // namespace zr::host::config
