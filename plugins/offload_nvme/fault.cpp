// Compiled only into the tests' own build of the plug-in.
#include "fault.hpp"

#ifdef ZR_FAILPOINTS
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <thread>

namespace nvme {

Faults::Faults(const zr::Host& host) {
  const char* all = std::getenv("ZR_TIER_FAULT");
  wanted_ = all ? all : "";
  if (wanted_.compare(0, 5, "rank=") != 0) return;
  const auto* job = host.find<zr_job_service>();
  const bool mine = job && job->rank == std::atoi(wanted_.c_str() + 5);
  wanted_ = mine ? wanted_.substr(wanted_.find(':') + 1) : "";
}

Fault Faults::at(const char* call) {
  const std::lock_guard lock(mutex_);
  const int now = ++times_[call];
  std::istringstream in(wanted_);
  for (std::string one; std::getline(in, one, ',');) {
    if (one.compare(0, one.find_first_of("=@"), call) != 0) continue;
    const auto when = one.find('@');
    if (when != one.npos && std::atoi(one.c_str() + when + 1) != now) continue;
    const auto equals = one.find('=');
    const std::string what = equals == one.npos ? "" : one.substr(equals + 1, when - equals - 1);
    if (what == "EIO") return {EIO, false};
    if (what == "ENOSPC") return {ENOSPC, false};
    if (what == "EPERM") return {EPERM, false};
    if (what == "EOPNOTSUPP") return {EOPNOTSUPP, false};
    return {0, true};  // "SHORT", or a fault without a value
  }
  return {};
}

bool Faults::flips() { return at("flip").cut; }

void Faults::slow() const {
  const auto at = wanted_.find("slow=");
  if (at != wanted_.npos) std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(wanted_.c_str() + at + 5)));
}

}  // namespace nvme
#endif
