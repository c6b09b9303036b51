// A page that a launch test and the ranks it starts share: what each rank does, and the ranks' stand-in for
// collectives.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace zr::test {

enum class Phase : int32_t { none, before_join, joining, computing, collective, left };

/// Zero at first. One per job, in a file that the ranks find in ZR_TEST_PAGE.
struct Page {
  static constexpr int kMaxRanks = 32;
  struct Rank {
    std::atomic<int32_t> pid;
    std::atomic<Phase> phase;
    std::atomic<uint64_t> sequence;  // collectives this rank has come to
    std::atomic<int64_t> step;
    std::atomic<int64_t> join_us;  // how long join took
    std::array<char, 64> store;    // ZR_STORE, to knock at
  };
  std::array<Rank, kMaxRanks> ranks;
  std::atomic<int64_t> stop_step;  // the steps after which all end, agreed on after a signal; 0: none came
};

inline Page* map_page(const std::string& file) {
  const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Page)) != 0) throw std::runtime_error("no page file " + file);
  void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + file);
  return static_cast<Page*>(memory);
}

}  // namespace zr::test
