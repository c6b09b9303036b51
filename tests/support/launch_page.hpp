// Memory that a launch test shares with the ranks it starts: what each rank is doing, and the counters with which the
// ranks emulate collectives.
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

/// The shared memory of one job, zero at first, in a file whose path the ranks read from ZR_TEST_PAGE.
struct Page {
  static constexpr int kMaxRanks = 32;
  struct Rank {
    std::atomic<int32_t> pid;
    std::atomic<Phase> phase;
    std::atomic<uint64_t> sequence;  // number of collectives this rank has entered
    std::atomic<int64_t> step;
    std::atomic<int64_t> join_us;  // duration of Control::join, microseconds
    std::array<char, 64> store;    // ZR_STORE, so that a test can connect to the store
  };
  std::array<Rank, kMaxRanks> ranks;
  std::atomic<bool> stop_computing;  // ends a computation that otherwise never ends
  std::atomic<int64_t> stop_step;    // the step at which all ranks stop after a signal; 0: no signal yet
};

inline Page* map_page(const std::string& file) {
  const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Page)) != 0) throw std::runtime_error("cannot create the shared file " + file);
  void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + file);
  return static_cast<Page*>(memory);
}

}  // namespace zr::test
