// The step of each rank in memory that the launcher shares with the ranks on its machine: it is exact also after a rank
// was killed, while heartbeats are 10 ms late.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace zr::host::control {

/// The variable with which the launcher passes its descriptor.
inline constexpr const char* kStepBoardVariable = "ZR_STEPS";

/// Any thread.
class StepBoard {
 public:
  /// For the launcher of the job `job`: a new board, whose descriptor the processes that it starts inherit. Null if the
  /// system refuses it; then heartbeats tell the step.
  static std::unique_ptr<StepBoard> create(const std::string& job, int world);
  /// For a rank: the board behind the descriptor `fd`, as text; null if that is not the board of this job.
  static std::unique_ptr<StepBoard> open(const char* fd, const std::string& job, int world);
  ~StepBoard();
  StepBoard(const StepBoard&) = delete;

  int descriptor() const { return fd_; }
  /// The step that a rank is making; 1 is the first, 0: none yet.
  void set(int rank, int64_t step);
  int64_t step(int rank) const;

 private:
  struct Page;
  StepBoard(int fd, Page* page, std::size_t bytes) : fd_(fd), page_(page), bytes_(bytes) {}
  static std::unique_ptr<StepBoard> map(int fd, int world);
  const int fd_;
  Page* const page_;
  const std::size_t bytes_;
};

}  // namespace zr::host::control
