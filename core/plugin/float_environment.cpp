#include "plugin/float_environment.hpp"

#include <limits>

namespace zr::host::plugin {

namespace {
// Half of the smallest normal number, as a result and as an operand. Traps are off meanwhile.
bool flushes_denormals() {
  std::fenv_t traps;
  std::feholdexcept(&traps);
  volatile float smallest = std::numeric_limits<float>::min(), half = 0.5f, large = 0x1p+60f;
  volatile float denormal = std::numeric_limits<float>::denorm_min();
  const volatile float result = smallest * half, operand = denormal * large;
  const bool flushes = result == 0.f || operand == 0.f;
  std::fesetenv(&traps);
  return flushes;
}
}  // namespace

FloatEnvironmentGuard::State FloatEnvironmentGuard::State::of_this_thread() {
  return {std::fegetround(), ::fegetexcept(), flushes_denormals()};
}

FloatEnvironmentGuard::FloatEnvironmentGuard() : before_(State::of_this_thread()) { std::fegetenv(&saved_); }

FloatEnvironmentGuard::~FloatEnvironmentGuard() { std::fesetenv(&saved_); }

std::string FloatEnvironmentGuard::change() const {
  const State now = State::of_this_thread();
  if (now.flushes != before_.flushes)
    return now.flushes ? "numbers below 2^-126 become 0" : "numbers below 2^-126 no longer become 0";
  if (now.rounding != before_.rounding) return "results are rounded in another direction";
  if (now.traps != before_.traps) return "other operations raise SIGFPE";
  return "";
}

}  // namespace zr::host::plugin
