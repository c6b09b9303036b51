#include "base/seconds_variable.hpp"

#include <fmt/format.h>

#include <cstdlib>

#include "base/error.hpp"

namespace zr::host {

double seconds_of_variable(const char* name, double otherwise) {
  const char* text = ::secure_getenv(name);
  if (!text) return otherwise;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (end == text || *end || !(seconds > 0) || seconds > 86400)
    fail_user(fmt::format("{}={}: expected seconds, more than 0 and at most 86400", name, text));
  return seconds;
}

}  // namespace zr::host
