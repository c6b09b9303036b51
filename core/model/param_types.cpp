#include "model/param_types.hpp"

#include <algorithm>
#include <set>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "model/torch_dtype.hpp"

namespace zr::host::model {

namespace {
constexpr std::size_t kMaxNames = 4;

// Weights are row-major in the flat buffers: other layouts are lost, which as_strided() can observe.
void report_layout(const std::vector<std::pair<std::string, torch::Tensor>>& parameters) {
  std::string names;
  std::size_t count = 0;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_contiguous()) continue;
    if (count++ < kMaxNames) names += (names.empty() ? "'" : ", '") + name + "'";
  }
  if (count == 0) return;
  if (count > kMaxNames) names += " and " + std::to_string(count - kMaxNames) + " more";
  log(ZR_LOG_INFO, std::string(count == 1 ? "parameter " : "parameters ") + names + (count == 1 ? " is" : " are") +
                       " stored row-major from now on: strides of another memory format are not kept, as_strided() " +
                       "sees the new ones, and results can differ from plain libtorch in the last digits");
}
}  // namespace

void check_param_types(const std::vector<std::pair<std::string, torch::Tensor>>& parameters,
                       const config::JobConfig& config, int rank) {
  if (rank == 0) report_layout(parameters);
  const std::string dtype(name_of(config.train().dtype));
  std::set<const c10::TensorImpl*> seen;  // a tied weight has several names
  std::string names;
  std::size_t count = 0;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == at::kFloat) continue;
    const std::string type = type_name(tensor.scalar_type());
    if (type == dtype || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (count++ < kMaxNames) names += (names.empty() ? "'" : ", '") + name + "' (" + type + ")";
  }
  if (count == 0) return;
  if (count > kMaxNames) names += " and " + std::to_string(count - kMaxNames) + " more";
  const std::string are =
      std::string(count == 1 ? "parameter " : "parameters ") + names + (count == 1 ? " is" : " are");
  if (const auto& rule = config.train().param_dtype; rule == config::ParamDtypeRule::reject)
    fail_user(are + " not in fp32 or train.dtype (" + dtype + "), and train.param_dtype (" + rule.origin.text() +
              ") is \"reject\"; convert the model before the engine is " +
              "made, for example with model->to(torch::kFloat)");
  if (rank == 0)
    log(ZR_LOG_INFO, are + " converted: training uses " + dtype + " weights" +
                         (config.train().keep_fp32->empty() ? "" : ", or fp32 ones where train.keep_fp32 says so,") +
                         " and fp32 optimizer states (train.dtype); " +
                         "train.param_dtype = \"reject\" makes this an error");
}

namespace {
void check_patterns(const config::Setting<std::vector<std::string>>& patterns, const std::vector<std::string>& names) {
  for (const std::string& pattern : patterns.value) {
    if (pattern == "*") continue;
    if (std::any_of(names.begin(), names.end(), [&](const auto& name) { return matches_glob(name, pattern); }))
      continue;
    const std::string near = nearest(pattern, names);
    fail_user(patterns.origin.text() + ": " + patterns.key + ": '" + printable(pattern) +
              "' matches no floating-point buffer of the model" +
              (near.empty() ? "" : "; the nearest is '" + near + "'") + "; `*` matches any sequence of characters");
  }
}
}  // namespace

void check_buffer_types(const std::vector<std::pair<std::string, torch::Tensor>>& buffers,
                        const config::JobConfig& config, int rank) {
  const config::Setting<std::vector<std::string>>& patterns = config.train().cast_buffers;
  const std::string dtype(name_of(config.train().dtype));
  std::vector<std::string> names;
  std::string kept;
  std::size_t count = 0;
  for (const auto& [name, tensor] : buffers) {
    if (!tensor.defined() || !tensor.is_floating_point()) continue;
    names.push_back(name);
    const bool is_cast = std::any_of(patterns->begin(), patterns->end(),
                                     [&name = name](const auto& pattern) { return matches_glob(name, pattern); });
    const std::string type = type_name(tensor.scalar_type());
    if (is_cast || type == dtype || tensor.numel() == 0) continue;
    if (count++ < kMaxNames) kept += (kept.empty() ? "'" : ", '") + name + "' (" + type + ")";
  }
  check_patterns(patterns, names);
  if (rank != 0 || count == 0 || config.train().dtype == ZR_F32) return;
  if (count > kMaxNames) kept += " and " + std::to_string(count - kMaxNames) + " more";
  log(ZR_LOG_INFO, std::string(count == 1 ? "buffer " : "buffers ") + kept +
                       (count == 1 ? " keeps its" : " keep their") + " type, because train.dtype = \"" + dtype +
                       "\" rounds parameters only; train.cast_buffers = [\"*\"] rounds buffers too");
}

}  // namespace zr::host::model
