#include "control/step_board.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace zr::host::control {

struct StepBoard::Page {
  char job[64];  // of the launcher, ended by 0
  std::atomic<int64_t> steps[1];
};

namespace {
std::size_t bytes_for(int world, std::size_t header) {
  return header + static_cast<std::size_t>(world) * sizeof(std::atomic<int64_t>);
}
}  // namespace

std::unique_ptr<StepBoard> StepBoard::map(int fd, int world) {
  const std::size_t bytes = bytes_for(world, offsetof(Page, steps));
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  return std::unique_ptr<StepBoard>(new StepBoard(fd, static_cast<Page*>(memory), bytes));
}

std::unique_ptr<StepBoard> StepBoard::create(const std::string& job, int world) {
  const int fd = ::memfd_create("zeroth-steps", 0);  // inherited
  if (fd < 0) return nullptr;
  std::unique_ptr<StepBoard> board;
  if (::ftruncate(fd, static_cast<off_t>(bytes_for(world, offsetof(Page, steps)))) == 0) board = map(fd, world);
  if (!board) {
    ::close(fd);
    return nullptr;
  }
  job.copy(board->page_->job, sizeof board->page_->job - 1);
  return board;
}

std::unique_ptr<StepBoard> StepBoard::open(const char* text, const std::string& job, int world) {
  if (!text) return nullptr;
  char* end = nullptr;
  const long fd = std::strtol(text, &end, 10);
  struct stat about {};
  if (end == text || *end || fd < 3 || ::fstat(static_cast<int>(fd), &about) != 0 ||
      about.st_size != static_cast<off_t>(bytes_for(world, offsetof(Page, steps))))
    return nullptr;
  const int own = ::fcntl(static_cast<int>(fd), F_DUPFD_CLOEXEC, 0);
  std::unique_ptr<StepBoard> board = own < 0 ? nullptr : map(own, world);
  if (!board && own >= 0) ::close(own);
  if (board && std::strncmp(board->page_->job, job.c_str(), sizeof board->page_->job) != 0) return nullptr;
  return board;
}

StepBoard::~StepBoard() {
  ::munmap(page_, bytes_);
  ::close(fd_);
}

void StepBoard::set(int rank, int64_t step) { page_->steps[rank].store(step, std::memory_order_relaxed); }
int64_t StepBoard::step(int rank) const { return page_->steps[rank].load(std::memory_order_relaxed); }

}  // namespace zr::host::control
