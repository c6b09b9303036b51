#include "model/parameter_registry.hpp"

namespace zr::host::model {

ParameterRegistry& ParameterRegistry::instance() {
  static auto* registry = new ParameterRegistry;  // never destroyed: engines may be destroyed after statics
  return *registry;
}

bool ParameterRegistry::add(const c10::TensorImpl* parameter, ParamRef ref) {
  ParameterRegistry& registry = instance();
  const MutexLock lock(registry.mutex_);
  return registry.params_.emplace(parameter, ref).second;
}

void ParameterRegistry::remove(const c10::TensorImpl* parameter) {
  ParameterRegistry& registry = instance();
  const MutexLock lock(registry.mutex_);
  registry.params_.erase(parameter);
}

std::optional<ParameterRegistry::ParamRef> ParameterRegistry::find(const c10::TensorImpl* parameter) {
  ParameterRegistry& registry = instance();
  const MutexLock lock(registry.mutex_);
  const auto found = registry.params_.find(parameter);
  return found == registry.params_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace zr::host::model
