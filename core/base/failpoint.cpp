// Failpoints, compiled into tests only.
#include <signal.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "base/file.hpp"

#ifdef ZR_FAILPOINTS
namespace zr::host {

namespace {
// The action that ZR_FAILPOINT requests at `name`, if this is the n-th call; else "".
std::string action(const std::string& name) {
  static std::map<std::string, int> times;
  const char* all = std::getenv("ZR_FAILPOINT");
  const std::string wanted = all ? all : "";
  if (wanted.compare(0, name.size() + 1, name + "=") != 0) return "";
  const auto at = wanted.find('@');
  const int when = at == std::string::npos ? 1 : std::atoi(wanted.c_str() + at + 1);
  if (++times[name] != when) return "";
  return wanted.substr(name.size() + 1, at == std::string::npos ? at : at - name.size() - 1);
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
  g_fired += !what.empty();
  g_short = what == "SHORT";
  return what == "ENOSPC" ? ENOSPC : what == "EIO" ? EIO : 0;
}

}  // namespace zr::host
#endif
