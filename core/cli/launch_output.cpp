#include "cli/launch_output.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <set>

#include "base/log.hpp"
#include "base/terminal.hpp"
#include "base/thread_without_signals.hpp"

namespace zr::host::cli {

namespace {
constexpr std::size_t kCongestedBytes = 4u << 20;
constexpr std::size_t kMaxTailBytes = 4096, kMaxLineBytes = 65536;
constexpr auto kLineTimeout = std::chrono::milliseconds(500);
constexpr auto kErrorTimeout = std::chrono::seconds(3);    // a rank that has printed why it fails ends before
constexpr auto kFailureTimeout = std::chrono::seconds(8);  // all ranks have ended before, unless they continue
constexpr std::string_view kErrorPrefix = "zeroth: error: ";

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const auto n = ::write(fd, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      pollfd wait{fd, POLLOUT, 0};
      poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool same_file(int a, int b) {
  struct stat x {
  }, y{};
  return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}
}  // namespace

OutputWriter::~OutputWriter() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void OutputWriter::start() {
  thread_ = thread_without_signals([this] { run(); });
}

void OutputWriter::write(int fd, std::string text) {
  const MutexLock lock(mutex_);
  queued_bytes_ += text.size();
  queue_.emplace_back(fd, std::move(text));
  changed_.notify_all();
}

bool OutputWriter::congested() const {
  const MutexLock lock(mutex_);
  return queued_bytes_ > kCongestedBytes;
}

bool OutputWriter::failed() const { return error() != 0; }

int OutputWriter::error() const {
  const MutexLock lock(mutex_);
  return error_;
}

void OutputWriter::flush() {
  MutexLock lock(mutex_);
  changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return queue_.empty(); });
}

void OutputWriter::run() {
  std::set<int> failed_fds;
  MutexLock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&]() ZR_REQUIRES(mutex_) { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto& [fd, text] = queue_.front();  // stays in place while others append
    lock.unlock();
    int error = 0;
    if (!failed_fds.count(fd) && !write_all(fd, text)) {
      error = errno;
      failed_fds.insert(fd);
    }
    lock.lock();
    if (error_ == 0) error_ = error;
    queued_bytes_ -= queue_.front().second.size();
    queue_.pop_front();
    changed_.notify_all();
  }
}

std::string lost_output_text(int error, bool stopped) {
  return fmt::format(
      "cannot write all output of the ranks: {}{}; free disk space, or keep the program running that reads the output",
      std::strerror(error), stopped ? ", so the job was stopped" : "");
}

Output::Output(OutputWriter& writer, int out_fd, int err_fd, int ranks, bool raw_rank0)
    : writer_(writer), raw_rank0_(raw_rank0), merged_(same_file(out_fd, err_fd)) {
  for (const int fd : {out_fd, err_fd}) sinks_.push_back({fd, isatty(fd) == 1, false, "", {}, {}});
  sources_.resize(static_cast<std::size_t>(ranks), std::vector<Source>(2));
}

void Output::bytes(int rank, Stream stream, std::string_view text) {
  Source& source = sources_[static_cast<std::size_t>(rank)][stream];
  Sink& to = sink(stream);
  if (rank == 0 && raw_rank0_) return raw_bytes(source, to, text);
  if (source.partial.empty()) source.since = Clock::now();
  source.partial += text;
  std::size_t begin = 0;
  for (std::size_t end; (end = source.partial.find('\n', begin)) != std::string::npos; begin = end + 1)
    complete_line(rank, source, to, source.partial.substr(begin, end - begin));
  source.partial.erase(0, begin);
  if (source.partial.size() > kMaxLineBytes) complete_line(rank, source, to, std::exchange(source.partial, ""));
}

// Writes rank 0's bytes at once, except error lines, which are written as complete lines or, if repeated, dropped.
void Output::raw_bytes(Source& source, Sink& to, std::string_view text) {
  if (source.partial.empty()) source.since = Clock::now();
  const std::string bytes = std::exchange(source.partial, "") + std::string(text);
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const auto end = rest.find('\n');
    const bool may_be_error = rest.substr(0, kErrorPrefix.size()) == kErrorPrefix.substr(0, rest.size()) ||
                              (source.in_error && rest[0] == ' ');
    if (source.line_begins && may_be_error) {
      if (end == std::string_view::npos && rest.size() < kMaxLineBytes) {
        source.partial = rest;
        return;
      }
      const std::string line(rest.substr(0, end));
      if (!repeats(0, source, line)) hold(to, source.block, line.starts_with(kErrorPrefix), line);
    } else {
      source.in_error = false;
      pass(to, rest.substr(0, end == std::string_view::npos ? end : end + 1));
      source.line_begins = false;
    }
    if (end == std::string_view::npos) return;
    source.line_begins = true;
    rest.remove_prefix(end + 1);
  }
}

void Output::complete_line(int rank, Source& source, Sink& to, std::string line) {
  const auto shown = line.rfind('\r', line.size() < 2 ? std::string::npos : line.size() - 2);
  if (shown != std::string::npos) line.erase(0, shown + 1);  // keeps the last state of a redrawn line
  if (repeats(rank, source, line)) return;
  const std::string text = fmt::format("[{}] {}", rank, line);
  source.in_error ? hold(to, source.block, line.starts_with(kErrorPrefix), text) : insert(to, text);
}

void Output::hold(Sink& to, int& block, bool begins, const std::string& line) {
  const auto held = std::find_if(held_errors_.begin(), held_errors_.end(),
                                 [&](const HeldError& error) { return error.number == block; });
  if (!begins && held != held_errors_.end()) return held->lines.push_back(line);
  block = next_block_++;
  held_errors_.push_back({block, &to, Clock::now(), {line}});
}

void Output::write(const HeldError& error) {
  if (error.sink->dirty && !error.sink->terminal) pass(*error.sink, "\n");  // ends rank 0's unfinished line
  for (const std::string& line : error.lines) insert(*error.sink, line);
}

void Output::failed() {
  if (!failed_since_) failed_since_ = Clock::now();
}

void Output::finish() {
  std::vector<HeldError> errors(std::make_move_iterator(held_errors_.rbegin()),
                                std::make_move_iterator(held_errors_.rend()));
  held_errors_.clear();
  std::stable_partition(errors.begin(), errors.end(),
                        [](const HeldError& error) { return error.lines[0].find(kRanksTitle) != std::string::npos; });
  for (const HeldError& error : errors) write(error);
  failed_since_.reset();
}

bool Output::repeats(int rank, Source& source, const std::string& line) {
  source.in_error = line.compare(0, kErrorPrefix.size(), kErrorPrefix) == 0 || (source.in_error && line[0] == ' ');
  if (!source.in_error) return false;
  const auto [at, fresh] = errors_.emplace(line, rank);
  return !fresh && at->second != rank;
}

// Writes rank 0's bytes. If they end a line, writes the lines of other ranks that waited for this.
void Output::pass(Sink& to, std::string_view bytes) {
  const std::string text = to.terminal ? with_bars_apart(to.tail, bytes) : std::string(bytes);
  writer_.write(to.fd, text);
  const auto fresh = text.find_last_of("\r\n");
  if (fresh != std::string::npos) to.tail.clear();
  to.tail += fresh == std::string::npos ? text : text.substr(fresh + 1);
  if (to.tail.size() > kMaxTailBytes) to.tail.erase(0, to.tail.size() - kMaxTailBytes);
  to.dirty = text.back() != '\n';
  if (!to.dirty) release(to);
}

// `text`, which follows `line`, so that bars and other text do not mix: text after a bar takes its place, unless it
// begins with a newline, and a bar after other text begins a new line.
std::string Output::with_bars_apart(std::string line, std::string_view text) {
  std::string apart;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool after_bar = line.ends_with(kBarEnd);
    if (after_bar && c != '\r' && c != '\n') apart += kClearLine;
    if (!after_bar && !line.empty() && text.substr(i).starts_with(kBarBegin)) apart += '\n';
    apart += c;
    if (c == '\r' || c == '\n')
      line.clear();
    else
      line += c;
  }
  return apart;
}

void Output::insert(Sink& to, const std::string& line) {
  if (!to.dirty) return writer_.write(to.fd, line + "\n");
  if (to.terminal) return writer_.write(to.fd, fmt::format("\r\x1b[K{}\n{}", line, to.tail));
  if (to.held_lines.empty()) to.held_since = Clock::now();
  to.held_lines.push_back(line);
}

void Output::release(Sink& to) {
  for (const auto& line : std::exchange(to.held_lines, {})) writer_.write(to.fd, line + "\n");
}

void Output::ended(int rank) {
  for (const Stream stream : {out, err}) {
    Source& source = sources_[static_cast<std::size_t>(rank)][stream];
    const std::string rest = std::exchange(source.partial, "");
    const bool raw = rank == 0 && raw_rank0_;
    if (!rest.empty() && !raw) complete_line(rank, source, sink(stream), rest);
    if (!rest.empty() && raw) pass(sink(stream), rest);
    if (raw && sink(stream).dirty && !sink(stream).held_lines.empty()) pass(sink(stream), "\n");
  }
}

void Output::error(const std::string& text) {
  const auto ranks = std::min(text.find("\n  rank "), text.size());
  const std::string table =
      ranks < text.size() ? fmt::format("{}{}{}\n", kErrorPrefix, kRanksTitle, text.substr(ranks)) : "";
  const std::string lines = fmt::format("{}{}{}\n", table, kErrorPrefix, text.substr(0, ranks));
  int block = -1;
  for (std::size_t begin = 0, end; (end = lines.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = lines.substr(begin, end - begin);
    const auto [at, fresh] = errors_.emplace(line, -1);
    if (fresh) hold(sink(err), block, line.starts_with(kErrorPrefix), line);
  }
}

void Output::tick() {
  const auto now = Clock::now();
  for (auto& to : sinks_)
    if (!to.held_lines.empty() && now - to.held_since > kLineTimeout) pass(to, "\n");
  if (failed_since_ && now - *failed_since_ > kFailureTimeout) finish();
  while (!failed_since_ && !held_errors_.empty() && now - held_errors_.front().since > kErrorTimeout) {
    write(held_errors_.front());
    held_errors_.pop_front();
  }
  if (!raw_rank0_) return;
  for (const Stream stream : {out, err}) {
    Source& source = sources_[0][stream];
    if (source.partial.empty() || now - source.since < kLineTimeout) continue;
    pass(sink(stream), std::exchange(source.partial, ""));
    source.line_begins = source.in_error = false;
  }
}

}  // namespace zr::host::cli
