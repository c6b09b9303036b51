// The files that a disk tier leaves behind, and its behavior under restrictions: child processes that are killed, or to
// which the kernel forbids io_uring, unnamed files or locked memory.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

#include <cstddef>

#include "support/offload_rig.hpp"

namespace zr::test {
namespace {

namespace fs = std::filesystem;

Tier open_in(const std::string& folder, const std::string& job = "job-1", const std::string& engine = "auto") {
  return Tier("nvme", {"path=\"" + folder + "\"", "engine=" + engine}, kPlugins, job);
}

void expect_round_trip(const Tier& tier) {
  const Pages in = filled(3 * kMiB, 4), out(3 * kMiB);
  const uint64_t slot = tier.reserve(in.size());
  EXPECT_GOOD(tier.wait(tier.begin_write({full_transfer(slot, in)})));
  EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
  EXPECT_TRUE(in == out);
}

// Makes a system call of this process fail from now on if all `bits` of an argument are set.
bool forbid(int call, int error, unsigned argument = 0, uint32_t bits = 0) {
  const uint32_t word = static_cast<uint32_t>(offsetof(seccomp_data, args) + 8 * argument);
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, word),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, bits),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, bits, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{sizeof program / sizeof *program, program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}
bool forbid_unnamed_files() { return forbid(SYS_openat, EOPNOTSUPP, 2, O_TMPFILE & ~O_DIRECTORY); }

TEST(NvmeFilesTest, CreatesUnnamedFilesThatOutliveTheirFolder) {
  const Scratch scratch;
  const std::string folder = scratch.path("swap");
  fs::create_directory(folder);
  const Tier tier = open_in(folder);
  const Pages in = filled(2 * kMiB, 1), out(2 * kMiB);
  const uint64_t slot = tier.reserve(in.size());
  EXPECT_GOOD(tier.write({full_transfer(slot, in)}));
  EXPECT_TRUE(names_in(folder).empty());
  fs::remove_all(folder);
  EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
  EXPECT_TRUE(in == out);
  expect_round_trip(tier);
}

uint64_t free_in(const std::string& folder) {
  struct statvfs disk {};
  ::statvfs(folder.c_str(), &disk);
  return disk.f_bavail * disk.f_frsize;
}

TEST(NvmeFilesTest, LeavesNothingWhenTheProcessIsKilled) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  const auto killed = [&](bool alone) {
    return in_child([&] {
      const uint64_t before = free_in(folder);
      const Tier tier = open_in(folder);
      const Pages in = filled(32 * kMiB, 1);
      const uint64_t slot = tier.reserve(in.size());
      if (alone) {
        EXPECT_LE(free_in(folder) + 32 * kMiB, before) << "the file exists";
      }
      tier.begin_write({full_transfer(slot, in)});
      if (!::testing::Test::HasFailure()) ::raise(SIGKILL);
    });
  };
  EXPECT_EQ(killed(false), 128 + SIGKILL);
  EXPECT_TRUE(names_in(folder).empty());
  // Exact to the byte, because no other process writes there.
  const int code = in_child([&] {
    if (!own_disk(folder, "size=64m")) ::_exit(77);
    const uint64_t before = free_in(folder);
    EXPECT_EQ(killed(true), 128 + SIGKILL);
    EXPECT_TRUE(names_in(folder).empty());
    for (int i = 0; i < 200 && free_in(folder) != before; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(free_in(folder), before);
  });
  if (code == 77) GTEST_SKIP() << "this machine does not allow mount namespaces; only file names were checked";
  EXPECT_EQ(code, 0);
}

TEST(NvmeFilesTest, KeepsNamedFilesInTheJobFolderWhileTheJobRuns) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  EXPECT_EQ(in_child([&] {
              ASSERT_TRUE(forbid_unnamed_files());
              {
                const Tier tier = open_in(folder), second = open_in(folder);
                EXPECT_EQ(names_in(folder), std::vector<std::string>{"zeroth-swap-job-1"});
                std::vector<std::string> names = names_in(scratch.path("zeroth-swap-job-1"));
                std::sort(names.begin(), names.end());
                EXPECT_EQ(names, (std::vector<std::string>{"lock", "rank-0", "rank-0.1"}));
                expect_round_trip(tier);
                expect_round_trip(second);
              }
              EXPECT_TRUE(names_in(folder).empty()) << "a normal end removes the folder";
            }),
            0);
}

// Such as one that loads data, and runs longer than the rank.
TEST(NvmeFilesTest, ChildrenOfARankDoNotKeepTheJobFolder) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  EXPECT_EQ(in_child([&] {
              ASSERT_TRUE(forbid_unnamed_files());
              int ready[2], end[2];
              ASSERT_TRUE(::pipe(ready) == 0 && ::pipe(end) == 0);
              char byte = 0;
              {
                const Tier tier = open_in(folder);
                if (::fork() == 0) {
                  ::close(end[1]);
                  if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
                  ::_exit(::read(end[0], &byte, 1) == 0 ? 0 : 1);
                }
                ASSERT_EQ(::read(ready[0], &byte, 1), 1) << "the child has its own descriptors now";
                EXPECT_EQ(names_in(folder), std::vector<std::string>{"zeroth-swap-job-1"});
              }
              EXPECT_TRUE(names_in(folder).empty());
            }),
            0);
}

TEST(NvmeFilesTest, RemovesFilesOfAKilledJob) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  EXPECT_EQ(in_child([&] {
              ASSERT_TRUE(forbid_unnamed_files());
              const Tier tier = open_in(folder, "killed");
              tier.reserve(kMiB);
              ::raise(SIGKILL);
            }),
            128 + SIGKILL);
  EXPECT_EQ(names_in(folder), std::vector<std::string>{"zeroth-swap-killed"});
  fs::create_directory(scratch.path("zeroth-swap-empty"));  // of a job that was killed before it took its lock
  scratch.write("zeroth-swap-notes.txt", "a user's own");
  const Tier next = open_in(folder, "next");
  EXPECT_EQ(names_in(folder), std::vector<std::string>{"zeroth-swap-notes.txt"});
}

TEST(NvmeFilesTest, KeepsFilesOfARunningJob) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  int ready[2], go[2];
  ASSERT_TRUE(::pipe(ready) == 0 && ::pipe(go) == 0);
  char byte = 0;
  const Child other([&] {
    ASSERT_TRUE(forbid_unnamed_files());
    const Tier tier = open_in(folder, "alive");
    const Pages in = filled(kMiB, 1), out(kMiB);
    const uint64_t slot = tier.reserve(in.size());
    EXPECT_GOOD(tier.write({full_transfer(slot, in)}));
    EXPECT_EQ(::write(ready[1], "x", 1), 1);
    EXPECT_EQ(::read(go[0], &byte, 1), 1);
    EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
    EXPECT_TRUE(in == out);
    EXPECT_TRUE(fs::exists(scratch.path("zeroth-swap-alive/rank-0")));
  });
  ::close(ready[1]);  // signals the end of this process
  EXPECT_EQ(::read(ready[0], &byte, 1), 1);
  {
    const Tier tier = open_in(folder, "mine");
    expect_round_trip(tier);
    EXPECT_EQ(names_in(folder), std::vector<std::string>{"zeroth-swap-alive"});
  }
  EXPECT_EQ(::write(go[1], "x", 1), 1);
  EXPECT_EQ(other.wait(), 0);
  EXPECT_TRUE(names_in(folder).empty());
}

// In a mount namespace of its own, as the next tests.
TEST(NvmeFilesTest, GivesReleasedSpaceBackToTheDiskAndReservesItAgain) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  const int code = in_child([&] {
    if (!own_disk(folder, "size=8m")) ::_exit(77);
    const Tier tier("nvme", {"path=\"" + folder + "\""});
    const uint64_t first = tier.reserve(2 * kMiB), middle = tier.reserve(2 * kMiB), last = tier.reserve(2 * kMiB);
    EXPECT_EQ(free_in(folder), 2 * kMiB);
    tier.release(middle);
    EXPECT_EQ(free_in(folder), 4 * kMiB) << "a hole in the file";
    EXPECT_EQ(tier.caps().capacity, 8 * kMiB);
    scratch.write("other", std::string(3 * kMiB, 'x'));
    EXPECT_EQ(tier.reserve_fails(2 * kMiB).native, ENOSPC) << "the hole has no space of its own";
    EXPECT_EQ(free_in(folder), kMiB);
    fs::remove(scratch.path("other"));
    const Pages in = filled(2 * kMiB, 1), out(2 * kMiB);
    const uint64_t again = tier.reserve(2 * kMiB);
    EXPECT_EQ(free_in(folder), 2 * kMiB);
    EXPECT_GOOD(tier.write({full_transfer(again, in)}));
    EXPECT_GOOD(tier.read({full_transfer(again, out)}));
    EXPECT_TRUE(in == out);
    tier.release(again);
    tier.release(last);
    EXPECT_EQ(free_in(folder), 6 * kMiB) << "the end of the file";
    tier.release(first);
    EXPECT_EQ(free_in(folder), 8 * kMiB);
  });
  if (code == 77) GTEST_SKIP() << "this machine does not allow mount namespaces";
  EXPECT_EQ(code, 0);
}

TEST(NvmeFilesTest, AFailedReservationTakesNoSpaceInAnyFolder) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  const int code = in_child([&] {
    if (!own_disk(folder, "size=8m")) ::_exit(77);
    for (const std::string name : {"a", "b"}) fs::create_directory(scratch.path(name));
    const uint64_t all = free_in(folder);
    const Tier tier("nvme", {"path=\"" + scratch.path("a") + ":" + scratch.path("b") + "\""});
    EXPECT_EQ(tier.reserve_fails(12 * kMiB).native, ENOSPC) << "in the second folder";
    EXPECT_EQ(free_in(folder), all);
    tier.reserve(6 * kMiB);
    EXPECT_EQ(free_in(folder), all - 6 * kMiB);
  });
  if (code == 77) GTEST_SKIP() << "this machine does not allow mount namespaces";
  EXPECT_EQ(code, 0);
}

TEST(NvmeFilesTest, ReusesReleasedSpaceThatTheFileSystemCannotFree) {
  const Scratch scratch;
  const std::string folder = scratch.folder().string();
  const int code = in_child([&] {
    if (!own_disk(folder, "size=8m")) ::_exit(77);
    ASSERT_TRUE(forbid(SYS_fallocate, EOPNOTSUPP));
    const Tier tier("nvme", {"path=\"" + folder + "\""});
    const uint64_t first = tier.reserve(3 * kMiB), last = tier.reserve(3 * kMiB);
    tier.release(first);
    EXPECT_EQ(free_in(folder), 2 * kMiB);
    EXPECT_EQ(tier.caps().capacity, 8 * kMiB);
    expect_round_trip(tier);  // of 3 MiB
    EXPECT_EQ(free_in(folder), 2 * kMiB);
    tier.release(last);
    EXPECT_EQ(free_in(folder), 5 * kMiB) << "the end of the file can be cut";
  });
  if (code == 77) GTEST_SKIP() << "this machine does not allow mount namespaces";
  EXPECT_EQ(code, 0);
}

TEST(NvmeEnginesTest, FallsBackToThreadsWhenIoUringIsForbidden) {
  const Scratch scratch;
  EXPECT_EQ(in_child([&] {
              ASSERT_TRUE(forbid(SYS_io_uring_setup, EPERM));
              ::testing::internal::CaptureStderr();
              const Tier tier = open_in(scratch.folder().string());
              const std::string said = ::testing::internal::GetCapturedStderr();
              EXPECT_NE(said.find("cannot use io_uring: Operation not permitted"), std::string::npos) << said;
              EXPECT_NE(said.find("using threads instead"), std::string::npos) << said;
              expect_round_trip(tier);
              EXPECT_THROW(open_in(scratch.folder().string(), "job-1", "uring"), Error);
            }),
            0);
}

TEST(NvmeEnginesTest, FallsBackToThreadsWhenOnlyTheSecondIoUringCallIsForbidden) {
  const Scratch scratch;
  EXPECT_EQ(in_child([&] {
              ASSERT_TRUE(forbid(SYS_io_uring_enter, ENOSYS));
              expect_round_trip(open_in(scratch.folder().string()));
            }),
            0);
}

TEST(NvmeEnginesTest, UsesRegisteredMemory) {
  const Scratch scratch;
  for (const std::string engine : {"auto", "threads"}) {
    const Tier tier = open_in(scratch.folder().string(), "job-1", engine);
    const Pages in = filled(6 * kMiB, 1), out(6 * kMiB);
    const zr_view both[] = {full_transfer(0, in).memory, full_transfer(0, out).memory};
    host::CallError error;
    for (int round = 0; round < 3; ++round) {
      for (const zr_view& one : both) EXPECT_EQ(tier.api().reg(tier.self(), &one, &error), ZR_OK) << error.msg;
      const uint64_t slot = tier.reserve(in.size());
      EXPECT_GOOD(tier.wait(tier.begin_write({part_of(slot, 0, in, kMiB, 5 * kMiB)})));
      EXPECT_GOOD(tier.wait(tier.begin_read({part_of(slot, 0, out, kMiB, 5 * kMiB)})));
      EXPECT_EQ(std::memcmp(in.data() + kMiB, out.data() + kMiB, 5 * kMiB), 0);
      for (const zr_view& one : both) tier.api().unreg(tier.self(), &one);
    }
    expect_round_trip(tier);
  }
}

TEST(NvmeEnginesTest, WorksWithoutLockedMemory) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can switch to a user with a locked-memory limit";
  const Scratch scratch;
  fs::permissions(scratch.folder(), fs::perms::all);
  EXPECT_EQ(in_child([&] {
              const rlimit none{65536, 65536};
              ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &none), 0);
              ASSERT_TRUE(::setgid(65534) == 0 && ::setuid(65534) == 0);
              const Tier tier = open_in(scratch.folder().string(), "job-1", "uring");
              const Pages memory = filled(4 * kMiB, 1);
              const zr_view view = full_transfer(0, memory).memory;
              host::CallError error;
              EXPECT_EQ(tier.api().reg(tier.self(), &view, &error), ZR_NOMEM);
              EXPECT_EQ(std::string(error.msg),
                        "tier nvme: cannot register 4194304 bytes with the kernel: Cannot allocate memory; "
                        "their transfers are slower (ulimit -l limits locked memory)");
              expect_round_trip(tier);
            }),
            0);
}

}  // namespace
}  // namespace zr::test
