// How a thread computes with floating-point numbers: rounding, traps, and numbers below the normal range.
#pragma once
#include <cfenv>
#include <string>

namespace zr::host::plugin {

/// Keeps the calling thread's floating-point environment while code of a plug-in runs. Use on one thread only.
class FloatEnvironmentGuard {
 public:
  FloatEnvironmentGuard();
  FloatEnvironmentGuard(const FloatEnvironmentGuard&) = delete;
  ~FloatEnvironmentGuard();

  /// What has changed since the construction: "numbers below 2^-126 become 0"; "" if nothing has.
  std::string change() const;

 private:
  struct State {
    int rounding, traps;
    bool flushes;  // denormal numbers, as operands or results
    static State of_this_thread();
  };
  std::fenv_t saved_;
  State before_;
};

}  // namespace zr::host::plugin
