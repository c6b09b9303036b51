#include "doctor/limits.hpp"

#include <gtest/gtest.h>

#include <cerrno>

#include "support/scratch.hpp"
#include "unit/core/doctor/text.hpp"

namespace zr::host::doctor {
namespace {

const JobNeeds kDiskJob{.file = "a.toml", .ranks = 2, .registered_bytes = 32 * kMiB, .has_disk_tier = true};

TEST(DoctorLimitsTest, ReportsLimitsThatSuffice) {
  LimitFacts facts;
  facts.locked = {64 << 10, 64 << 10};
  facts.files = {1024, 4096};
  EXPECT_EQ(lines_of(limit_checks(facts, {})),
            "ok limits/locked memory: 64.00 KiB\nok limits/open files: 1024\n"
            "ok limits/processes: unlimited per user\n");
  facts.is_root = facts.locks_freely = true;
  EXPECT_EQ(lines_of(limit_checks(facts, kDiskJob)),
            "ok limits/locked memory: no limit for this user\nok limits/open files: 1024\n"
            "ok limits/processes: no limit for this user\n");
}

TEST(DoctorLimitsTest, WarnsAboutLockedMemoryForADiskTier) {
  LimitFacts facts;
  facts.locked = {64 << 10, 64 << 10};
  EXPECT_EQ(
      lines_of({limit_checks(facts, kDiskJob).front()}),
      "warning limits/locked memory: 64.00 KiB; the offload tier on disk registers 64.00 MiB with the kernel, and "
      "transfers from other memory are slower\n  fix: sudo prlimit --pid $$ --memlock=unlimited\n");
  facts.locked.hard = kUnlimited;
  EXPECT_EQ(limit_checks(facts, kDiskJob).front().command, "ulimit -S -l unlimited");
  facts.locked.hard = 128 << 20;
  EXPECT_EQ(limit_checks(facts, kDiskJob).front().command, "ulimit -S -l 65536");
}

TEST(DoctorLimitsTest, ReportsTooFewOpenFiles) {
  LimitFacts facts;
  facts.files = {100, 1000};
  EXPECT_EQ(lines_of({limit_checks(facts, {.file = "a.toml", .ranks = 64})[1]}),
            "problem limits/open files: 100; a job of 64 ranks needs 320\n  fix: ulimit -S -n 320\n");
  facts.files.hard = 100;
  EXPECT_EQ(limit_checks(facts, {.file = "a.toml", .ranks = 64})[1].command, "sudo prlimit --pid $$ --nofile=320");
}

TEST(DoctorLimitsTest, ReportsTooFewProcesses) {
  LimitFacts facts;
  facts.cores = 8;
  facts.processes = {20, kUnlimited};
  EXPECT_EQ(lines_of({limit_checks(facts, {}).back()}),
            "problem limits/processes: 20 per user; a job of 1 rank needs about 40 processes and threads\n"
            "  fix: ulimit -S -u 40\n");
  facts.is_root = true;
  EXPECT_EQ(limit_checks(facts, {}).back().verdict, Verdict::ok) << "the limit does not apply to root";
  facts.processes_left = 10;
  facts.group = "/sys/fs/cgroup/pids/box";
  EXPECT_EQ(
      lines_of({limit_checks(facts, {}).back()}),
      "problem limits/processes: no limit for this user, 10 left in control group /sys/fs/cgroup/pids/box; a job of "
      "1 rank needs about 40 processes and threads; raise pids.max of that control group (in a container: its limit "
      "of processes)\n");
}

TEST(DoctorLimitsTest, WarnsAboutLimitsOfFileSizeAndAddressSpace) {
  LimitFacts facts;
  facts.file_size = {kGiB, kUnlimited};
  facts.address_space = {4 * kGiB, 4 * kGiB};
  const Checks checks = limit_checks(facts, {});
  ASSERT_EQ(checks.size(), 5u);
  EXPECT_EQ(lines_of({checks[3], checks[4]}),
            "warning limits/file size: 1.00 GiB; larger checkpoints and files of offload tiers cannot be written\n"
            "  fix: ulimit -S -f unlimited\n"
            "warning limits/address space: 4.00 GiB; libtorch and the memory of other ranks take more addresses than "
            "memory\n  fix: sudo prlimit --pid $$ --as=unlimited\n");
}

TEST(DoctorLimitsTest, ReadsTheSmallestLimitOfProcesses) {
  const test::Scratch root;
  root.write("proc/self/cgroup", "8:pids:/a/b\n");
  root.write("sys/fs/cgroup/pids/a/pids.max", "100\n");
  root.write("sys/fs/cgroup/pids/a/pids.current", "90\n");
  root.write("sys/fs/cgroup/pids/a/b/pids.max", "max\n");
  root.write("sys/fs/cgroup/pids/a/b/pids.current", "5\n");
  root.write("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
  const LimitFacts facts = limit_facts(root.folder().string());
  EXPECT_EQ(facts.processes_left, 10);
  EXPECT_EQ(facts.group, "/sys/fs/cgroup/pids/a");
  EXPECT_TRUE(facts.locks_freely);
}

TEST(DoctorIoUringTest, ReportsThatItIsPermitted) {
  EXPECT_EQ(lines_of(io_uring_checks({0, 0, 0, false, "6.1.0"}, {}, true)),
            "ok disk/io_uring: permitted (Linux 6.1.0)\n");
}

TEST(DoctorIoUringTest, NamesTheSettingOrTheFilterThatForbidsIt) {
  const std::string effect = ", so offload tiers on disk use threads, which are slower";
  EXPECT_EQ(lines_of(io_uring_checks({EPERM, 0, 2, false, "6.6.0"}, {}, false)),
            "warning disk/io_uring: io_uring_setup fails on Linux 6.6.0 (Operation not permitted)" + effect +
                "; kernel.io_uring_disabled is 2\n  fix: sudo sysctl -w kernel.io_uring_disabled=0\n");
  EXPECT_EQ(lines_of(io_uring_checks({EPERM, 0, 0, true, "6.6.0"}, {}, true)),
            "warning disk/io_uring: io_uring_setup fails on Linux 6.6.0 (Operation not permitted)" + effect +
                "; permit io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile of the container "
                "(docker run --security-opt seccomp=PROFILE)\n");
  EXPECT_EQ(lines_of(io_uring_checks({0, EPERM, -1, false, "6.1.0"}, kDiskJob, true)),
            "warning disk/io_uring: io_uring_enter fails on Linux 6.1.0 (Operation not permitted)" + effect +
                "; permit io_uring in the security module of this system\n");
  EXPECT_EQ(lines_of(io_uring_checks({ENOSYS, 0, -1, false, "4.19.0"}, {}, true)),
            "warning disk/io_uring: io_uring_setup fails on Linux 4.19.0 (Function not implemented)" + effect +
                "; use a kernel from Linux 5.1 on that is built with CONFIG_IO_URING\n");
  EXPECT_EQ(io_uring_checks({ENOMEM, 0, -1, false, "5.10.0"}, {}, true).front().command,
            "prlimit --pid $$ --memlock=unlimited");
}

TEST(DoctorIoUringTest, IsNotNeededByAJobWithoutADiskTier) {
  EXPECT_EQ(
      lines_of(io_uring_checks({EPERM, 0, 2, false, "6.6.0"}, {.file = "a.toml"}, true)),
      "ok disk/io_uring: io_uring_setup fails on Linux 6.6.0 (Operation not permitted); this job has no offload tier "
      "on disk\n");
}

}  // namespace
}  // namespace zr::host::doctor
