// comm_shm lifetime: ranks that close, die or run on another host, and the shared memory.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "multirank/comm/shm_ranks.hpp"
#include "support/sanitizers.hpp"

namespace {

using namespace zr::testing;
using testing::HasSubstr;
using zr::host::comm::done_new;
using zr::host::comm::done_poll;
using zr::host::comm::done_release;

TEST(CommShmShutdownTest, AbortCancelsWaitsAndLaterOperations) {
  expect_success(on_ranks(2, [](RawComm& comm, Rank& rank) {
    barrier(comm);
    if (rank.rank == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    std::jthread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      comm.api().abort(comm.comm());
    });
    zr_done* done = done_new(comm.host().abi());
    auto* memory = static_cast<float*>(comm.allocate(4096));
    ASSERT_EQ(comm.submit(collective(ZR_ALL_REDUCE, memory, 10, memory, 10, "never"), done), ZR_OK);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(comm.submit(collective(ZR_BARRIER, nullptr, 0, nullptr, 0, "waits")), ZR_CANCELLED);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1000));
    EXPECT_EQ(done_poll(done, nullptr), ZR_CANCELLED) << "abort must resolve operations in flight";
    done_release(done);
    EXPECT_EQ(comm.submit(collective(ZR_BARRIER, nullptr, 0, nullptr, 0, "later")), ZR_CANCELLED);
  }));
}

TEST(CommShmShutdownTest, WaitingRanksNameClosedPeer) {
  const SharedJob job;
  const auto ranks = run_ranks(3, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
    RawComm comm(rig);
    barrier(comm);
    if (rank.rank == 2) return;
    EXPECT_EQ(comm.submit(collective(ZR_BARRIER, nullptr, 0, nullptr, 0, "end of step 7")), ZR_COMM);
    rank.give(comm.said());
  });
  expect_success(ranks);
  for (int r = 0; r < 2; ++r)
    EXPECT_THAT(
        ranks[static_cast<std::size_t>(r)].gave,
        testing::MatchesRegex("rank [012] has closed its communicator while this rank is in barrier 'end of step 7'"));
}

TEST(CommShmShutdownTest, CloseCancelsPendingCompletions) {
  const SharedJob job;
  expect_success(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
    zr_done* done = done_new(rig.host().abi());
    {
      RawComm comm(rig);
      barrier(comm);
      if (rank.rank == 0) {
        EXPECT_EQ(comm.submit(collective(ZR_BARRIER, nullptr, 0, nullptr, 0, "alone"), done), ZR_OK);
      }
    }
    if (rank.rank == 0) {
      zr::host::CallError error;
      EXPECT_EQ(done_poll(done, &error), ZR_CANCELLED);
      EXPECT_STREQ(error.msg, "barrier 'alone': the communicator was closed");
    }
    done_release(done);
  }));
}

// The arenas that a process has mapped or opened: inode number, and bytes that are mapped.
std::map<std::string, int64_t> arenas_of(const std::string& process) {
  std::map<std::string, int64_t> arenas;
  std::ifstream maps("/proc/" + process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string range, mode, offset, device, inode, name;
    fields >> range >> mode >> offset >> device >> inode >> name;
    if (name.rfind("/memfd:zeroth-rank-", 0) != 0) continue;
    const std::size_t dash = range.find('-');
    arenas[inode] += std::stoll(range.substr(dash + 1), nullptr, 16) - std::stoll(range.substr(0, dash), nullptr, 16);
  }
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator("/proc/" + process + "/fd", error)) {
    struct stat status {};
    if (std::filesystem::read_symlink(file, error).string().rfind("/memfd:zeroth-rank-", 0) == 0 &&
        ::stat(file.path().c_str(), &status) == 0)
      arenas[std::to_string(status.st_ino)] += 0;
  }
  return arenas;
}

std::set<std::string> shared_files() {
  std::set<std::string> names;
  if (std::filesystem::exists("/dev/shm"))
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
      if (entry.path().string().find("zeroth") != std::string::npos) names.insert(entry.path());
  return names;
}

// The memory of an arena, which has no name in a file system, is freed when no process maps it or has it open.
TEST(CommShmShutdownTest, KilledRanksLeaveNoSharedMemory) {
  const auto files = shared_files();
  std::set<std::string> arenas;
  const auto ranks = on_ranks(3,
                              [](RawComm& comm, Rank&) {
                                auto* memory = static_cast<float*>(comm.allocate(96 << 20));
                                comm.run(collective(ZR_ALL_REDUCE, memory, 1000, memory, 1000, "maps the peers"));
                                for (;;) barrier(comm);
                              },
                              {.meanwhile = [&](const std::vector<pid_t>& pids) {
                                for (int i = 0; i < 2000 && arenas.size() < 3; ++i) {
                                  std::this_thread::sleep_for(std::chrono::milliseconds(20));
                                  for (const pid_t pid : pids)
                                    for (const auto& [inode, bytes] : arenas_of(std::to_string(pid)))
                                      if (bytes >= 96 << 20) arenas.insert(inode);
                                }
                                for (const pid_t pid : pids) ::kill(pid, SIGKILL);
                              }});
  for (const RankResult& r : ranks) EXPECT_EQ(r.signal, SIGKILL);
  EXPECT_EQ(arenas.size(), 3u) << "the arenas must be mapped while the ranks run";
  for (const auto& process : std::filesystem::directory_iterator("/proc")) {
    const std::string name = process.path().filename();
    if (name.find_first_not_of("0123456789") != name.npos) continue;
    for (const auto& [inode, bytes] : arenas_of(name)) EXPECT_EQ(arenas.count(inode), 0u) << "process " << name;
  }
  EXPECT_EQ(shared_files(), files);
}

TEST(CommShmMemoryTest, AllocationsAreZeroedAlignedRecordedAndFreed) {
  const SharedJob job;
  expect_success(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world), {.keys = "staging_bytes = \"1MiB\"\n"});
    {
      RawComm comm(rig);
      const auto rows = rig.ledger().rows();
      ASSERT_EQ(rows.size(), 1u);
      EXPECT_EQ(rows[0].kind, zr::host::MemoryKind::communicator);
      EXPECT_GT(rows[0].now, 1 << 20);
      EXPECT_LT(rows[0].now, (1 << 20) + (128 << 10)) << "only signals may add to the staging buffer";
      for (int round = 0; round < 30; ++round) {
        auto* memory = static_cast<float*>(comm.allocate(16 << 20));
        ASSERT_EQ(reinterpret_cast<uintptr_t>(memory) % 4096, 0u);
        for (int i = 0; i < (16 << 20) / 4; i += 1013) ASSERT_EQ(memory[i], 0) << round;
        std::fill_n(memory, 4 << 20, 1.0f);
        comm.run(collective(ZR_ALL_REDUCE, memory, 4 << 20, memory, 4 << 20, "round"));
        ASSERT_EQ(memory[4711], 2);
        comm.free(memory);
      }
      barrier(comm);
      // The address space of this process: memory that peers freed must be unmapped too.
      std::ifstream statm("/proc/self/maps");
      int64_t mapped = 0;
      for (std::string line; std::getline(statm, line);)
        if (line.find("memfd:zeroth") != line.npos) {
          uint64_t first = 0, end = 0;
          char dash;
          std::istringstream(line) >> std::hex >> first >> dash >> end;
          mapped += static_cast<int64_t>(end - first);
        }
      EXPECT_LT(mapped, 40 << 20);
      zr::host::CallError error;
      zr_view out{};
      EXPECT_EQ(comm.api().mem_alloc(comm.comm(), 64, 8192, 0, &out, &error), ZR_UNSUPPORTED);
      // mem_alloc must fail where the kernel would otherwise kill processes. The file-size limit protects the machine
      // if the check fails.
      const rlimit guard{1 << 30, RLIM_INFINITY};
      ::signal(SIGXFSZ, SIG_IGN);
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &guard), 0);
      EXPECT_EQ(comm.api().mem_alloc(comm.comm(), uint64_t{1} << 50, 64, 0, &out, &error), ZR_NOMEM);
      EXPECT_THAT(error.msg,
                  testing::AllOf(
                      HasSubstr("cannot allocate 1125899906842624 bytes of shared memory (a buffer): the machine has "),
                      HasSubstr(" bytes available; use fewer ranks on this node, or a strategy that shards more")));
    }
    for (const auto& row : rig.ledger().rows()) EXPECT_EQ(row.now, 0);
  }));
}

TEST(CommShmMemoryTest, RespectsAddressSpaceLimit) {
  if (zr::test::kSanitized) GTEST_SKIP() << zr::test::kSanitizerMemory;
  expect_success(on_ranks(2, [](RawComm& comm, Rank&) {
    std::ifstream statm("/proc/self/statm");
    int64_t pages = 0;
    statm >> pages;
    const rlimit limit{static_cast<rlim_t>(pages * 4096 + (100 << 20)), RLIM_INFINITY};
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    auto* memory = static_cast<float*>(comm.allocate(40 << 20));
    comm.run(collective(ZR_ALL_REDUCE, memory, 10 << 20, memory, 10 << 20, "both ranks' 40 MiB"));
    zr::host::CallError error;
    zr_view out{};
    EXPECT_EQ(comm.api().mem_alloc(comm.comm(), 60 << 20, 64, 0, &out, &error), ZR_NOMEM);
  }));
}

TEST(CommShmOpenTest, RejectsRanksOnAnotherHost) {
  const SharedJob job;
  const auto ranks = run_ranks(2, [&](Rank& rank) {
    const auto control = std::make_shared<SharedControl>(job, rank.rank, rank.world);
    if (rank.rank == 1)
      control->change = [](const std::string& key, const std::string& value) {
        if (key.find("address") == key.npos) return value;
        const auto rest = value.substr(value.find(' '));
        return "another-boot" + rest.substr(0, rest.rfind(' ')) + " far-away";
      };
    CommRig rig(control);
    try {
      RawComm comm(rig);
    } catch (const std::exception& failure) {
      job.break_job(failure.what());  // as the control plane does when a process ends
      throw;
    }
  });
  EXPECT_THAT(
      ranks[0].threw,
      testing::AllOf(
          HasSubstr("comm_shm connects ranks of one node only: rank 1 is on host 'far-away', this is rank 0 on '"),
          HasSubstr("start all ranks on one node, or choose a communicator for several nodes")));
  EXPECT_FALSE(ranks[1].ok());
}

TEST(CommShmOpenTest, RejectsMemoryOtherThanAnnounced) {
  const SharedJob job;
  const auto ranks = run_ranks(2, [&](Rank& rank) {
    const auto control = std::make_shared<SharedControl>(job, rank.rank, rank.world);
    if (rank.rank == 1)
      control->change = [](const std::string& key, const std::string& value) {
        if (key.find("address") == key.npos) return value;
        std::istringstream in(value);
        std::string boot, ns, pid, fd, identity, host;
        in >> boot >> ns >> pid >> fd >> identity >> host;
        return boot + " " + ns + " " + pid + " " + fd + " 12345 " + host;
      };
    CommRig rig(control);
    try {
      RawComm comm(rig);
    } catch (const std::exception& failure) {
      job.break_job(failure.what());  // as the control plane does when a process ends
      throw;
    }
  });
  EXPECT_THAT(ranks[0].threw, HasSubstr("is not the memory that rank 1 announced"));
}

TEST(CommShmOpenTest, ProcessCanOpenRepeatedly) {
  const SharedJob job;
  expect_success(run_ranks(2, [&](Rank& rank) {
    CommRig rig(std::make_shared<SharedControl>(job, rank.rank, rank.world));
    for (int i = 0; i < 5; ++i) {
      RawComm comm(rig);
      auto* memory = static_cast<float*>(comm.allocate(400));
      memory[0] = static_cast<float>(i);
      comm.run(collective(ZR_ALL_REDUCE, memory, 100, memory, 100, "once"));
      EXPECT_EQ(memory[0], 2 * static_cast<float>(i));
    }
  }));
}

}  // namespace
