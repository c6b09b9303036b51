#include "cli/machine_load.hpp"

#include <gtest/gtest.h>
#include <sys/sysmacros.h>

#include "support/scratch.hpp"

namespace zr::host::cli {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

TEST(MachineLoadTest, ReportsWhatOtherProcessesDid) {
  const MachineLoad begin{100, 50, 1, 0, 0};
  EXPECT_EQ(disturbance_text(begin, {110, 55, 3, 4 * kGiB, 4 * kGiB}, 2), "");  // 0.3 of 2 cores
  EXPECT_EQ(disturbance_text(begin, {110, 70, 3, 4 * kGiB, 4 * kGiB}, 2), "other processes used 1.8 of 2 cores");
  EXPECT_EQ(disturbance_text(begin, {110, 52, 3, 4 * kGiB, 2 * kGiB}, 2),
            "other processes moved 2.00 GiB on this disk (this one 2.00 GiB)");
  EXPECT_EQ(disturbance_text(begin, {110, 70, 3, 4 * kGiB, kGiB}, 2),
            "other processes used 1.8 of 2 cores and moved 3.00 GiB on this disk (this one 1.00 GiB)");
  EXPECT_EQ(disturbance_text({100}, {110}, 2), "");  // nothing is known
}

TEST(MachineLoadTest, ReadsTheCountersOfTheKernel) {
  const test::Scratch root;
  root.write("proc/stat", "cpu  100 0 100 9000 500 0 0 0 0 0\ncpu0 1 2 3\n");
  root.write("proc/diskstats", "   8       0 sda 1 0 1 0 1 0 1 0\n 259       1 nvme0n1 10 0 16 5 20 0 48 5 0 0 0\n");
  root.write("proc/self/io", "rchar: 1\nread_bytes: 1024\nwrite_bytes: 2048\n");
  const MachineLoad load = MachineLoad::now(gnu_dev_makedev(259, 1), root.folder().string());
  EXPECT_EQ(load.busy_seconds, 200.0 / static_cast<double>(::sysconf(_SC_CLK_TCK)));
  EXPECT_EQ(load.disk_bytes, 64 * 512);
  EXPECT_EQ(load.own_disk_bytes, 3072);
  EXPECT_EQ(MachineLoad::now(gnu_dev_makedev(1, 1), root.folder().string()).disk_bytes, -1);
}

}  // namespace
}  // namespace zr::host::cli
