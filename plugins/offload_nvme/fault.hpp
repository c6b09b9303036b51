// Faults for tests: ZR_TIER_FAULT="read=EIO@12,slow=50ms"; on one rank only: "rank=1:read=EIO@12".
// "write=kill@12" kills the process. Compiled in if ZR_FAILPOINTS is defined.
#pragma once

#include "zr/base.hpp"

#ifdef ZR_FAILPOINTS
#include <map>
#include <string>

#include "zr/mutex.hpp"
#endif

namespace nvme {

struct Fault {
  int error = 0;     // the errno with which the call must fail, or 0
  bool cut = false;  // the call must transfer fewer bytes than requested
};

/// One object per instance, so that n counts the calls of this instance. [any]
#ifdef ZR_FAILPOINTS
class Faults {
 public:
  explicit Faults(const zr::Host& host);
  Fault at(const char* call);  // the fault of the next "read", "write", "uring" or "unnamed"
  bool flips();                // true: flip one bit on the disk, of the data just written
  void slow() const;           // sleeps for the requested time

 private:
  zr::Mutex mutex_;
  std::map<std::string, int> times_ ZR_GUARDED_BY(mutex_);  // calls so far, by name
  std::string faults_;                                      // of this rank, as in ZR_TIER_FAULT
};
#else
class Faults {
 public:
  explicit Faults(const zr::Host&) {}
  static Fault at(const char*) { return {}; }
  static bool flips() { return false; }
  static void slow() {}
};
#endif

}  // namespace nvme
