// A variable of this process's environment, which tests change.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace zr::test {

/// Restores the variable when it is destroyed.
class EnvironmentVariable {
 public:
  explicit EnvironmentVariable(const char* name) : name_(name) {
    if (const char* value = std::getenv(name)) before_ = value;
  }
  ~EnvironmentVariable() {
    if (before_)
      set(*before_);
    else
      unset();
  }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;
  void set(const std::string& value) const { ::setenv(name_, value.c_str(), 1); }
  void unset() const { ::unsetenv(name_); }

 private:
  const char* const name_;
  std::optional<std::string> before_{};
};

}  // namespace zr::test
