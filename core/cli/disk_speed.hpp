// How fast a tier of disk reads and writes, by size and number of transfers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plugin/plugin.hpp"

namespace zr::host {

struct DiskTest {
  Component tier;                      // with the keys path, block_bytes and depth
  std::string path;                    // a folder
  std::vector<std::string> overrides;  // of its other keys
  int64_t bytes = 0;                   // of the file, a multiple of 32 MiB
  double seconds = 0;                  // about so long in all
};

/// Bytes per second; 0: the file is too small to have so much under way.
struct DiskPoint {
  int64_t block_bytes, depth;
  double read, write, mixed;  // mixed: half of each, both counted
};

struct DiskSpeed {
  std::vector<DiskPoint> points;  // by block, then depth
  int64_t used = 0;               // bytes of the file that were read and written
  int64_t written = 0;            // bytes, in all
  /// Of the points within 5 % of the fastest mixed, the one with the least under way.
  const DiskPoint& best() const;
};

/// Through the tier as a job would use it, in a file (one part for each depth) that is written once before and is gone
/// afterwards; medians of rounds. `at` is told how far it is. Throws Failure with what the tier says, and where there
/// is too little room.
DiskSpeed measure_disk(const DiskTest& test, const std::function<void(int done, int all)>& at);

}  // namespace zr::host
