// Measures how fast a disk tier reads and writes, by size and number of transfers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plugin/plugin.hpp"

namespace zr::host::cli {

struct DiskTest {
  plugin::Component tier;              // must have the keys path, block_bytes and depth
  std::string path;                    // a folder on the disk
  std::vector<std::string> overrides;  // values of the tier's other keys, as "table.key=value"
  int64_t bytes = 0;                   // size of the test file, a multiple of 32 MiB
  double seconds = 0;                  // approximate total duration
};

/// Rates in bytes per second. 0 if the file is too small for this many bytes in flight.
struct DiskPoint {
  int64_t block_bytes, depth;
  double read, write, mixed;  // mixed: alternating reads and writes, both counted
};

struct DiskSpeed {
  std::vector<DiskPoint> points;  // ordered by block, then depth
  int64_t used = 0;               // bytes of the file that the measurement used
  int64_t written = 0;            // total bytes written
  /// Among the points within 5 % of the fastest mixed rate, the one with the fewest bytes in flight.
  const DiskPoint& best() const;
};

/// Measures the tier as a job would use it. The test file has one part per depth; it is written once before the
/// measurement and removed afterwards. Rates are medians over rounds. Calls `on_progress` with the progress. Throws
/// Error if the tier fails or the disk or memory is too small.
DiskSpeed measure_disk(const DiskTest& test, const std::function<void(int done, int total)>& on_progress);

}  // namespace zr::host::cli
