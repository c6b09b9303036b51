#include "model/operator_modes.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>

namespace zr::host::model {

namespace {
// libtorch tells the nesting only when it changes it.
int autocast_nesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}
}  // namespace

OperatorModes OperatorModes::current(const std::vector<at::Device>& devices) {
  OperatorModes modes;
  for (const at::Device& device : devices) {
    const at::DeviceType type = device.type();
    modes.autocast_.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  modes.cast_cache_ = at::autocast::is_autocast_cache_enabled();
  modes.nesting_ = autocast_nesting();
  modes.default_dtype_ = c10::get_default_dtype();
  const at::Context& context = at::globalContext();
  modes.deterministic_ = context.deterministicAlgorithms();
  modes.warn_only_ = context.deterministicAlgorithmsWarnOnly();
  modes.onednn_ = context.userEnabledMkldnn();
  return modes;
}

OperatorModes OperatorModes::without_cast_cache() const {
  OperatorModes modes = *this;
  modes.cast_cache_ = false;
  return modes;
}

void OperatorModes::restore() const {
  c10::AutogradState::set_tls_state(autograd_);
  for (const Autocast& mode : autocast_) {
    at::autocast::set_autocast_enabled(mode.type, mode.enabled);
    at::autocast::set_autocast_dtype(mode.type, mode.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cast_cache_);
  while (autocast_nesting() < nesting_) at::autocast::increment_nesting();
  while (autocast_nesting() > nesting_) at::autocast::decrement_nesting();
  if (c10::get_default_dtype() != default_dtype_) c10::set_default_dtype(default_dtype_);
  at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() != deterministic_ || context.deterministicAlgorithmsWarnOnly() != warn_only_)
    context.setDeterministicAlgorithms(deterministic_, warn_only_);
  if (context.userEnabledMkldnn() != onednn_) context.setUserEnabledMkldnn(onednn_);
}

}  // namespace zr::host::model
