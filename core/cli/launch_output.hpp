// Merges the ranks' output onto the launcher's: rank 0's bytes as they are, the others' in whole lines with "[1] "
// before.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zr::host {

/// Writes in order on its own thread, so that a terminal that is held does not hold the job.
class OutputWriter {
 public:
  OutputWriter() = default;
  ~OutputWriter();
  /// Starts the thread; until then text is kept.
  void start();
  void write(int fd, std::string text);
  bool congested() const;
  /// A descriptor cannot be written any more (its reader went away, its disk is full); what is for it is dropped.
  bool failed() const;
  /// The errno of the first such failure; 0: none.
  int error() const;
  /// Returns when everything is written.
  void flush();

 private:
  void run();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<int, std::string>> queue_;
  std::size_t bytes_ = 0;
  bool stopping_ = false;
  int error_ = 0;
  std::thread thread_;
};

/// For one thread. `tick()` wants to be called a few times a second.
class Output {
 public:
  enum Stream { out = 0, err = 1 };
  /// Lines of ranks go to out_fd and err_fd with their rank before them; raw_rank0: rank 0's byte for byte.
  Output(OutputWriter& writer, int out_fd, int err_fd, int ranks, bool raw_rank0);
  /// Both streams go to one place: a rank needs one pipe only (`out`), which keeps the order.
  bool merged() const { return merged_; }
  void bytes(int rank, Stream stream, std::string_view text);
  /// The rank has ended: its unfinished lines are written.
  void ended(int rank);
  /// An error of the launcher itself, to stderr. An error's lines that another has printed already are not repeated.
  void error(const std::string& text);
  void tick();

 private:
  using Clock = std::chrono::steady_clock;
  struct Sink {
    int fd;
    bool terminal;
    bool dirty = false;             // rank 0's line is not finished
    std::string tail;               // of it, since the last carriage return
    std::vector<std::string> held;  // lines of others, until it is
    Clock::time_point held_since;
  };
  struct Source {
    std::string partial;  // bytes of an unfinished line, not yet written
    Clock::time_point since;
    bool line_begins = true, in_error = false;
  };
  Sink& sink(Stream stream) { return sinks_[merged_ ? 0 : stream]; }
  void raw_bytes(Source& source, Sink& sink, std::string_view text);
  void whole_line(int rank, Source& source, Sink& sink, std::string line);
  bool repeats(int rank, Source& source, const std::string& line);
  void pass(Sink& sink, std::string_view text);
  void insert(Sink& sink, const std::string& line);
  void release(Sink& sink);

  OutputWriter& writer_;
  const bool raw_rank0_;
  bool merged_ = false;
  std::vector<Sink> sinks_;
  std::vector<std::vector<Source>> sources_;        // by rank and stream
  std::map<std::string, int, std::less<>> errors_;  // lines of errors, and who printed them first
};

}  // namespace zr::host
