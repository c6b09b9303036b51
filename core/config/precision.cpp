#include "config/precision.hpp"

#include <cmath>

#include "base/dtype.hpp"
#include "base/text.hpp"

namespace zr::host {

Precision precision_of(const JobConfig& config) {
  const zr_dtype weights = float_dtype_named(config.text("train.dtype")),
                 sums = float_dtype_named(config.text("gradients.dtype"));
  const std::string& reduce_dtype = config.text("gradients.reduce_dtype");
  // A reduction to fp32 upcasts; a narrower reduction needs gradients of its own dtype, as held gradients do.
  const bool held = config.text("gradients.reduce") == "last_micro_step";
  const zr_dtype standard = sums == ZR_F32 && !held ? weights : sums;
  return {weights, reduce_dtype == "auto" ? standard : float_dtype_named(reduce_dtype), sums};
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

std::vector<std::pair<std::string, std::string>> precision_problems(const JobConfig& config) {
  std::vector<std::pair<std::string, std::string>> problems;
  const Precision types = precision_of(config);
  const std::string sums(name_of(types.reduced_gradients));
  if (types.gradients != types.reduced_gradients && config.text("gradients.reduce") == "last_micro_step") {
    problems.emplace_back(
        "gradients.reduce_dtype",
        "is \"" + config.text("gradients.reduce_dtype") + "\", but with gradients.reduce = \"last_micro_step\" (" +
            config.origin("gradients.reduce").text() + ") each rank accumulates gradients in " + sums +
            " before it communicates them; set gradients.reduce_dtype = \"auto\", or gradients.reduce = "
            "\"each_micro_step\"");
  } else if (types.reduced_gradients != ZR_F32 && types.gradients != types.reduced_gradients) {
    problems.emplace_back("gradients.reduce_dtype",
                          "is \"" + config.text("gradients.reduce_dtype") + "\", but gradients.dtype is \"" + sums +
                              "\" (" + config.origin("gradients.dtype").text() + "), and reduced gradients in " + sums +
                              " need gradients that are communicated in " + sums +
                              "; set gradients.reduce_dtype = \"auto\", or gradients.dtype = \"fp32\"");
  }
  const double fixed = config.number("fp16.loss_scale"), least = config.number("fp16.min_loss_scale");
  const auto allowed = [](double value) { return is_power_of_two(value) && value <= kMaxLossScale; };
  if (fixed != 0 && !allowed(fixed)) problems.emplace_back("fp16.loss_scale", not_a_power_of_two(fixed, "0 or "));
  if (!allowed(least)) problems.emplace_back("fp16.min_loss_scale", not_a_power_of_two(least, ""));
  const int64_t power = config.integer("fp16.initial_scale_power");
  if (least > std::exp2(power))
    problems.emplace_back("fp16.min_loss_scale", shortest(least) + " is above the initial loss scale, 2^" +
                                                     std::to_string(power) + " (fp16.initial_scale_power, " +
                                                     config.origin("fp16.initial_scale_power").text() +
                                                     "); lower this one or raise fp16.initial_scale_power");
  return problems;
}

}  // namespace zr::host
