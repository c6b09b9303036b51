// Failpoints, compiled into tests only.
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "base/file.hpp"

#ifdef ZR_FAILPOINTS
namespace zr::host {

namespace {
// The action that ZR_FAILPOINT requests at `name`, if this is the n-th call; else "".
std::string action(const std::string& name) {
  static auto& calls = *new std::map<std::string, int>;  // never destroyed
  const char* variable = std::getenv("ZR_FAILPOINT");
  const std::string setting = variable ? variable : "";
  if (setting.compare(0, name.size() + 1, name + "=") != 0) return "";
  const auto at_sign = setting.find('@');
  const int call_number = at_sign == std::string::npos ? 1 : std::atoi(setting.c_str() + at_sign + 1);
  if (++calls[name] != call_number) return "";
  return setting.substr(name.size() + 1, at_sign == std::string::npos ? at_sign : at_sign - name.size() - 1);
}
}  // namespace

void failpoint(const char* name) {
  if (action(name) == "kill") ::raise(SIGKILL);
}

namespace {
bool g_short = false;  // injected_error() saw SHORT; the next shortened_write() applies it
}

int64_t shortened_write(const char*, int64_t bytes) {
  return std::exchange(g_short, false) && bytes > 1 ? bytes / 2 : bytes;
}

namespace {
int g_fired = 0;
}
int failpoints_fired() { return g_fired; }

int injected_error(const char* call) {
  const std::string what = action(call);
  while (what == "STALL") ::pause();
  g_fired += !what.empty();
  g_short = what == "SHORT";
  return what == "ENOSPC" ? ENOSPC : what == "EIO" ? EIO : 0;
}

}  // namespace zr::host
#endif
