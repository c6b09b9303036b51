// Merges the output of the ranks into the launcher's: rank 0's bytes unchanged, the other ranks' as complete lines with
// a prefix such as "[1] ".
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "zr/mutex.hpp"

namespace zr::host::cli {

/// Writes text in order on its own thread, so that a blocked terminal does not block the job. Thread-safe.
class OutputWriter {
 public:
  OutputWriter() = default;
  ~OutputWriter();
  /// Starts the thread; text that is written earlier is queued.
  void start();
  /// Queues text for a descriptor. Does not block.
  void write(int fd, std::string text) ZR_EXCLUDES(mutex_);
  /// True if more than 4 MiB are queued.
  bool congested() const ZR_EXCLUDES(mutex_);
  /// True if a write failed (the reader has ended, the disk is full). Further text for that descriptor is dropped.
  bool failed() const ZR_EXCLUDES(mutex_);
  /// The errno of the first failed write, or 0.
  int error() const ZR_EXCLUDES(mutex_);
  /// Blocks until the queue is empty.
  void flush() ZR_EXCLUDES(mutex_);

 private:
  void run() ZR_EXCLUDES(mutex_);
  mutable Mutex mutex_;
  ConditionVariable changed_;
  std::deque<std::pair<int, std::string>> queue_ ZR_GUARDED_BY(mutex_);
  std::size_t queued_bytes_ ZR_GUARDED_BY(mutex_) = 0;
  bool stopping_ ZR_GUARDED_BY(mutex_) = false;
  int error_ ZR_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

/// The error message if the output of ranks could not be written, with an errno; `stopped`: which stopped the job.
std::string lost_output_text(int error, bool stopped);

/// Not thread-safe. Call tick() a few times per second.
class Output {
 public:
  enum Stream { out = 0, err = 1 };
  /// Lines of ranks go to out_fd and err_fd with the rank as prefix; raw_rank0: rank 0's bytes go there unchanged.
  Output(OutputWriter& writer, int out_fd, int err_fd, int ranks, bool raw_rank0);
  /// True if out_fd and err_fd are the same file: then one pipe per rank (`out`) is enough and keeps the order.
  bool merged() const { return merged_; }
  /// Takes bytes that a rank has written to a stream.
  void bytes(int rank, Stream stream, std::string_view text);
  /// Writes the unfinished lines of a rank that has ended.
  void ended(int rank);
  /// Takes an error of the launcher itself for stderr, as log_failure() would write it, without the lines that a rank
  /// has printed already. Errors of ranks and of the launcher are held for 3 s, and for 8 s after failed().
  void error(const std::string& text);
  /// A rank has failed: what is held now is written by finish().
  void failed();
  /// Writes the errors that are held: the report of the ranks first, then the newest; the last one is the first cause.
  void finish();
  /// Writes lines that have waited for more than 0.5 s for the end of another line.
  void tick();

 private:
  using Clock = std::chrono::steady_clock;
  struct Sink {
    int fd;
    bool terminal;
    bool dirty = false;                   // rank 0's current line is unfinished
    std::string tail;                     // the text of that line since its last carriage return
    std::vector<std::string> held_lines;  // lines of other ranks that wait for the end of that line
    Clock::time_point held_since;
  };
  struct Source {
    std::string partial;  // bytes of an unfinished line, not yet written
    Clock::time_point since;
    bool line_begins = true, in_error = false;
    int block = -1;  // number of the held error that the next line may continue
  };
  struct HeldError {
    int number;
    Sink* sink;
    Clock::time_point since;
    std::vector<std::string> lines;
  };
  Sink& sink(Stream stream) { return sinks_[merged_ ? 0 : stream]; }
  void raw_bytes(Source& source, Sink& sink, std::string_view text);
  void complete_line(int rank, Source& source, Sink& sink, std::string line);
  bool repeats(int rank, Source& source, const std::string& line);
  void pass(Sink& sink, std::string_view bytes);
  static std::string with_bars_apart(std::string line, std::string_view text);
  void insert(Sink& sink, const std::string& line);
  void hold(Sink& sink, int& block, bool begins, const std::string& line);
  void write(const HeldError& error);
  void release(Sink& sink);

  OutputWriter& writer_;
  const bool raw_rank0_;
  bool merged_ = false;
  std::vector<Sink> sinks_;
  std::vector<std::vector<Source>> sources_;        // by rank and stream
  std::map<std::string, int, std::less<>> errors_;  // error lines, and the rank that printed each first
  std::deque<HeldError> held_errors_;               // in the order in which they came
  int next_block_ = 0;
  std::optional<Clock::time_point> failed_since_;
};

}  // namespace zr::host::cli
