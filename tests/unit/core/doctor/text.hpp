// Checks as text, for comparisons.
#pragma once

#include <fmt/format.h>

#include <string>

#include "doctor/check.hpp"

namespace zr::host::doctor {

/// "verdict topic/name: message", and "  fix: command" below it; a line per check.
inline std::string lines_of(const Checks& checks) {
  std::string text;
  for (const Check& check : checks) {
    text += fmt::format("{} {}/{}: {}\n", name_of(check.verdict), check.topic, check.name, check.message);
    if (!check.command.empty()) text += fmt::format("  fix: {}\n", check.command);
  }
  return text;
}

constexpr int64_t kMiB = int64_t{1} << 20, kGiB = int64_t{1} << 30;

}  // namespace zr::host::doctor
