// Words that plug-ins pass to the engine must be understood: unknown bits and values are errors, not ignored.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace zr::host {

/// Why the bits of `value`, named `member` in messages, are rejected: it has bits that are not in `known`. "" if it has
/// none.
inline std::string unknown_bits_problem(std::string_view member, uint64_t value, uint64_t known) {
  if ((value & ~known) == 0) return "";
  return fmt::format(
      "{} has bits that this zeroth does not know ({:#x}); install a newer zeroth, or a plug-in for this one", member,
      value & ~known);
}
/// Why a reserved member is rejected: it is not 0. "" if it is 0.
inline std::string reserved_problem(std::string_view member, uint64_t value) {
  return unknown_bits_problem(member, value, 0);
}

}  // namespace zr::host
