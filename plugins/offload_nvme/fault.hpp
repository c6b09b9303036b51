// Faults that tests ask for: ZR_TIER_FAULT="read=EIO@12,slow=50ms", and on one rank alone "rank=1:read=EIO@12".
// Compiled in where ZR_FAILPOINTS is defined.
#pragma once

#include "zr/base.hpp"

#ifdef ZR_FAILPOINTS
#include <map>
#include <mutex>
#include <string>
#endif

namespace nvme {

struct Fault {
  int error = 0;     // what the call shall fail with, or 0
  bool cut = false;  // it shall end before its bytes do
};

/// One per instance, so that n counts from its beginning. [any]
#ifdef ZR_FAILPOINTS
class Faults {
 public:
  explicit Faults(const zr::Host& host);
  Fault at(const char* call);  // the next "read", "write", "uring", "unnamed"
  bool flips();                // a bit of what is just being written changes on the disk
  void slow() const;           // sleeps as long as was asked for

 private:
  std::mutex mutex_;
  std::map<std::string, int> times_;
  std::string wanted_;
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
