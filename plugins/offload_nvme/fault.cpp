// Compiled only into the tests' own build of the plug-in.
#include "fault.hpp"

#ifdef ZR_FAILPOINTS
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <thread>

namespace nvme {

Faults::Faults(const zr::Host& host) {
  const char* variable = std::getenv("ZR_TIER_FAULT");
  faults_ = variable ? variable : "";
  if (faults_.compare(0, 5, "rank=") != 0) return;
  const auto* job = host.find<zr_job_service>();
  const bool is_rank = job && job->rank == std::atoi(faults_.c_str() + 5);
  faults_ = is_rank ? faults_.substr(faults_.find(':') + 1) : "";
}

Fault Faults::at(const char* call) {
  const zr::MutexLock lock(mutex_);
  const int call_number = ++times_[call];
  std::istringstream in(faults_);
  for (std::string fault; std::getline(in, fault, ',');) {
    if (fault.compare(0, fault.find_first_of("=@"), call) != 0) continue;
    const auto at_sign = fault.find('@');
    if (at_sign != fault.npos && std::atoi(fault.c_str() + at_sign + 1) != call_number) continue;
    const auto equals = fault.find('=');
    const std::string what = equals == fault.npos ? "" : fault.substr(equals + 1, at_sign - equals - 1);
    if (what == "kill") ::raise(SIGKILL);
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
  const auto at = faults_.find("slow=");
  if (at != faults_.npos) std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(faults_.c_str() + at + 5)));
}

}  // namespace nvme
#endif
