#include "base/trace.hpp"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.hpp"
#include "zr/error.hpp"

namespace zr::host {

namespace {
using Json = nlohmann::ordered_json;

double microseconds(std::chrono::steady_clock::duration duration) {
  return std::round(std::chrono::duration<double, std::nano>(duration).count()) / 1000;
}

// One event. Names come from programs: they may be invalid UTF-8.
std::string text_of(const Json& event) { return event.dump(-1, ' ', false, Json::error_handler_t::replace); }

constexpr std::size_t kMaxUnwrittenBytes = 64 << 10;
}  // namespace

Trace::Trace(int rank) : rank_(rank) {
  text_ =
      "[" +
      text_of(
          {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", fmt::format("rank {}", rank)}}}});
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
  if (fresh)
    text_ +=
        ",\n" +
        text_of(
            {{"ph", "M"}, {"name", "thread_name"}, {"pid", rank_}, {"tid", at->second}, {"args", {{"name", track}}}});
  text_ += ",\n" + text_of({{"ph", "X"},
                            {"name", name},
                            {"pid", rank_},
                            {"tid", at->second},
                            {"ts", microseconds(begin.time_since_epoch())},
                            {"dur", microseconds(end - begin)}});
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
