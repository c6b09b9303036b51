#include "model/trained.hpp"

namespace zr::host {

Trained& Trained::all() {
  static Trained trained;
  return trained;
}

bool Trained::add(const c10::TensorImpl* parameter, Place place) {
  const std::lock_guard lock(all().mutex_);
  return all().places_.emplace(parameter, place).second;
}

void Trained::remove(const c10::TensorImpl* parameter) {
  const std::lock_guard lock(all().mutex_);
  all().places_.erase(parameter);
}

std::optional<Trained::Place> Trained::find(const c10::TensorImpl* parameter) {
  const std::lock_guard lock(all().mutex_);
  const auto at = all().places_.find(parameter);
  return at == all().places_.end() ? std::nullopt : std::optional(at->second);
}

}  // namespace zr::host
