#include "base/trace.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/log.hpp"
#include "zr/error.hpp"

namespace zr::host {

namespace {
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

std::string microseconds(std::chrono::steady_clock::duration duration) {
  return fmt::format("{:.3f}", std::chrono::duration<double, std::micro>(duration).count());
}

constexpr std::size_t kMaxUnwrittenBytes = 64 << 10;
}  // namespace

Trace::Trace(int rank) : rank_(rank) {
  text_ = fmt::format(
      "[{{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": {}, \"args\": {{\"name\": \"rank {}\"}}}}", rank, rank);
}

Trace::~Trace() {
  if (!file_) return;
  text_ += "]\n";
  try {
    flush_locked();
  } catch (const Error& failure) {
    log(ZR_LOG_ERROR, failure.what());
  }
}

void Trace::open(File file) {
  const MutexLock lock(mutex_);
  file_.emplace(std::move(file));
  flush_locked();
}

void Trace::flush_locked() {
  file_->write(bytes_written_, text_.data(), static_cast<int64_t>(text_.size()));
  bytes_written_ += static_cast<int64_t>(text_.size());
  text_.clear();
}

void Trace::span(const std::string& track, const std::string& name, Time begin, Time end) {
  const MutexLock lock(mutex_);
  if (failed_) return;
  const auto [at, fresh] = tracks_.emplace(track, static_cast<int>(tracks_.size()) + 1);
  const std::string ids = fmt::format(", \"pid\": {}, \"tid\": {}", rank_, at->second);
  if (fresh)
    text_ += fmt::format(",\n{{\"ph\": \"M\", \"name\": \"thread_name\"{}, \"args\": {{\"name\": {}}}}}", ids,
                         quoted(track));
  text_ += fmt::format(",\n{{\"ph\": \"X\", \"name\": {}{}, \"ts\": {}, \"dur\": {}}}", quoted(name), ids,
                       microseconds(begin.time_since_epoch()), microseconds(end - begin));
  if (!file_ || text_.size() <= kMaxUnwrittenBytes) return;
  try {
    flush_locked();
  } catch (const Error& failure) {  // training continues without a trace
    log(ZR_LOG_ERROR, fmt::format("{}; the trace is incomplete from here on", failure.what()));
    file_.reset();
    text_.clear();
    failed_ = true;
  }
}

}  // namespace zr::host
