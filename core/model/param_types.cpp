#include "model/param_types.hpp"

#include <set>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"

namespace zr::host::model {

namespace {
constexpr std::size_t kMaxNames = 4;

// The type's name: that of train.dtype, or else that of C++.
std::string type_name(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return "double";
    case at::kHalf: return std::string(name_of(ZR_F16));
    case at::kBFloat16: return std::string(name_of(ZR_BF16));
    default: return c10::toString(type);
  }
}

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
    log(ZR_LOG_INFO, are + " converted: training uses " + dtype + " weights and fp32 optimizer states (train.dtype); " +
                         "train.param_dtype = \"reject\" makes this an error");
}

}  // namespace zr::host::model
