#include "model/parameter_registry.hpp"

namespace zr::host::model {

ParameterRegistry& ParameterRegistry::instance() {
  static ParameterRegistry registry;
  return registry;
}

bool ParameterRegistry::add(const c10::TensorImpl* parameter, ParamRef ref) {
  const std::lock_guard lock(instance().mutex_);
  return instance().params_.emplace(parameter, ref).second;
}

void ParameterRegistry::remove(const c10::TensorImpl* parameter) {
  const std::lock_guard lock(instance().mutex_);
  instance().params_.erase(parameter);
}

std::optional<ParameterRegistry::ParamRef> ParameterRegistry::find(const c10::TensorImpl* parameter) {
  const std::lock_guard lock(instance().mutex_);
  const auto at = instance().params_.find(parameter);
  return at == instance().params_.end() ? std::nullopt : std::optional(at->second);
}

}  // namespace zr::host::model
