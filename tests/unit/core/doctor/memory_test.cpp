#include "doctor/memory.hpp"

#include <gtest/gtest.h>

#include <cerrno>

#include "support/scratch.hpp"
#include "unit/core/doctor/text.hpp"

namespace zr::host::doctor {
namespace {

const std::string kPages = "ok memory/huge pages: transparent huge pages are \"madvise\"\n";

TEST(DoctorMemoryTest, ReportsAvailableMemoryAndItsLimit) {
  EXPECT_EQ(lines_of(memory_checks({8 * kGiB, 4 * kGiB, "", -1, "madvise"}, {}, true)),
            "ok memory/available: 4.00 GiB of 8.00 GiB\n" + kPages);
  EXPECT_EQ(lines_of(memory_checks({8 * kGiB, kGiB, "/sys/fs/cgroup/a", -1, "madvise"}, {}, true)),
            "ok memory/available: 1.00 GiB of 8.00 GiB (limit of control group /sys/fs/cgroup/a)\n" + kPages);
}

TEST(DoctorMemoryTest, ReportsTooLittleMemoryForTheRanks) {
  EXPECT_EQ(
      lines_of(memory_checks({8 * kGiB, 64 * kMiB, "", -1, "madvise"}, {}, true)),
      "problem memory/available: 64.00 MiB of 8.00 GiB; 1 rank needs 128.00 MiB before the model (libtorch and the "
      "communicator's buffers); end other programs\n" +
          kPages);
  const JobNeeds needs{.file = "a.toml", .ranks = 4, .communicator_bytes = 22 * kMiB};
  EXPECT_EQ(
      lines_of(memory_checks({8 * kGiB, 400 * kMiB, "", -1, "madvise"}, needs, true)),
      "problem memory/available: 400.00 MiB of 8.00 GiB; 4 ranks need 600.00 MiB before the model (libtorch and the "
      "communicator's buffers)\n  fix: zeroth train a.toml job.ranks=2\n" +
          kPages);
}

TEST(DoctorMemoryTest, ReportsStrictOvercommit) {
  EXPECT_EQ(
      lines_of(memory_checks({8 * kGiB, 4 * kGiB, "", kGiB, "madvise"}, {}, false)),
      "ok memory/available: 4.00 GiB of 8.00 GiB\n"
      "warning memory/overcommit: vm.overcommit_memory is 2, and 1.00 GiB can still be reserved, which is less than "
      "the available memory\n  fix: sudo sysctl -w vm.overcommit_memory=0\n" +
          kPages);
  EXPECT_EQ(memory_checks({8 * kGiB, 4 * kGiB, "", kMiB, "madvise"}, {}, false)[1].verdict, Verdict::problem);
}

TEST(DoctorMemoryTest, WarnsIfHugePagesAreOff) {
  EXPECT_EQ(lines_of({memory_checks({8 * kGiB, 4 * kGiB, "", -1, "never"}, {}, false).back()}),
            "warning memory/huge pages: transparent huge pages are \"never\", so large buffers use small pages and are "
            "slower\n  fix: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled\n");
  EXPECT_EQ(lines_of({memory_checks({8 * kGiB, 4 * kGiB, "", -1, ""}, {}, false).back()}),
            "ok memory/huge pages: the kernel has no transparent huge pages; large buffers use small pages\n");
}

TEST(DoctorMemoryTest, ReadsTheFilesOfTheKernel) {
  const test::Scratch root;
  root.write("proc/meminfo",
             "MemTotal: 4096 kB\nMemAvailable:    2048 kB\nCommitLimit: 3072 kB\nCommitted_AS: 1024 kB\n");
  root.write("proc/sys/vm/overcommit_memory", "0\n");
  root.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  MemoryFacts facts = memory_facts(root.folder().string());
  EXPECT_EQ(facts.total, 4 * kMiB);
  EXPECT_EQ(facts.available, 2 * kMiB);
  EXPECT_EQ(facts.commit, -1);
  EXPECT_EQ(facts.huge_pages, "madvise");
  root.write("proc/sys/vm/overcommit_memory", "2\n");
  root.write("proc/self/cgroup", "4:memory:/box\n0::/box\n");
  root.write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1048576\n");
  root.write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "600000\n");
  root.write("sys/fs/cgroup/memory/box/memory.stat", "cache 1\ntotal_inactive_file 100000\n");
  facts = memory_facts(root.folder().string());
  EXPECT_EQ(facts.available, 1048576 - 600000 + 100000);
  EXPECT_EQ(facts.group, "/sys/fs/cgroup/memory/box");
  EXPECT_EQ(facts.commit, 2 * kMiB);
  const test::Scratch empty;
  EXPECT_EQ(lines_of(memory_checks(memory_facts(empty.folder().string()), {}, true)),
            "warning memory/available: unknown, because /proc/meminfo has no MemAvailable\n"
            "ok memory/huge pages: the kernel has no transparent huge pages; large buffers use small pages\n");
}

SharedMemoryFacts working() {
  SharedMemoryFacts facts;
  facts.mounted = true;
  facts.folder_size = facts.folder_free = kGiB;
  return facts;
}

TEST(DoctorSharedMemoryTest, ReportsMemoryFilesAndTheFolder) {
  EXPECT_EQ(lines_of(shared_memory_checks(working(), {}, true)),
            "ok memory/memory files: ranks of this machine can share memory (memfd_create)\n"
            "ok memory//dev/shm: 1.00 GiB free of 1.00 GiB; Zeroth itself does not use it\n");
}

TEST(DoctorSharedMemoryTest, ReportsMemoryFilesThatFail) {
  SharedMemoryFacts facts = working();
  facts.memfd_error = EACCES;
  facts.memfd_noexec = 2;
  EXPECT_EQ(
      lines_of({shared_memory_checks(facts, {}, false).front()}),
      "problem memory/memory files: memfd_create fails (Permission denied), so ranks of this machine cannot share "
      "memory\n  fix: sudo sysctl -w vm.memfd_noexec=1\n");
  facts.memfd_error = ENOSYS;
  facts.memfd_noexec = -1;
  EXPECT_EQ(
      lines_of({shared_memory_checks(facts, {.file = "a.toml", .ranks = 1}, false).front()}),
      "warning memory/memory files: memfd_create fails (Function not implemented), so ranks of this machine cannot "
      "share memory; permit memfd_create in the sandbox\n");
  facts.memfd_error = 0;
  facts.reopen_error = EACCES;
  EXPECT_EQ(
      lines_of({shared_memory_checks(facts, {.file = "a.toml", .ranks = 2}, false).front()}),
      "problem memory/memory files: opening a memory file through /proc fails (Permission denied), so ranks of this "
      "machine cannot share memory; permit it in the sandbox\n");
}

TEST(DoctorSharedMemoryTest, WarnsAboutTheFolderOfOtherLibraries) {
  SharedMemoryFacts facts = working();
  facts.mounted = false;
  EXPECT_EQ(
      lines_of({shared_memory_checks(facts, {}, false).back()}),
      "warning memory//dev/shm: not mounted; Zeroth itself does not use it, but other communication libraries do\n"
      "  fix: sudo sh -c 'mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /dev/shm'\n");
  EXPECT_EQ(shared_memory_checks(facts, {}, true).back().command,
            "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /dev/shm");
  facts = working();
  facts.folder_size = facts.folder_free = 64 * kMiB;
  EXPECT_EQ(
      lines_of({shared_memory_checks(facts, {}, true).back()}),
      "warning memory//dev/shm: 64.00 MiB free of 64.00 MiB; Zeroth itself does not use it, but other communication "
      "libraries need more\n  fix: mount -o remount,size=50% /dev/shm\n");
  facts = working();
  facts.folder_error = EACCES;
  EXPECT_EQ(
      lines_of({shared_memory_checks(facts, {}, false).back()}),
      "warning memory//dev/shm: this user cannot write to it (Permission denied); Zeroth itself does not use it, but "
      "other communication libraries do\n  fix: sudo chmod 1777 /dev/shm\n");
  facts.folder_error = EROFS;
  EXPECT_EQ(shared_memory_checks(facts, {}, true).back().command, "mount -o remount,rw /dev/shm");
}

}  // namespace
}  // namespace zr::host::doctor
