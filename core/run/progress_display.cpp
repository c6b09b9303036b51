#include "run/progress_display.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "base/ledger.hpp"
#include "base/terminal.hpp"
#include "base/text.hpp"

namespace zr::host::run {

namespace {

std::string count_text(const StepProgress& now) { return fmt::format("{}/{}", now.step, now.steps); }

// "device 70.39 MiB", "disk 1.20 GiB": the tiers that have held bytes.
std::vector<std::string> memory_texts(const StepProgress& now) {
  std::vector<std::string> texts;
  for (std::size_t tier = 0; tier < now.memory.size(); ++tier)
    if (now.memory[tier] > 0 || tier == 0)
      texts.push_back(fmt::format("{} {}", kTierNames[tier], bytes_text(now.memory[tier])));
  return texts;
}

// "waits: compute 49 %, communication 20 %": at most `max_causes` causes of at least 1 %, in the order of `waits`.
std::string waits_text(const StepProgress& now, std::size_t max_causes) {
  double total = 0;
  for (const auto& [cause, seconds] : now.waits) total += seconds;
  std::vector<std::pair<double, std::string_view>> shares;
  for (const auto& [cause, seconds] : now.waits)
    if (total > 0 && seconds / total >= 0.01) shares.emplace_back(100 * seconds / total, cause);
  if (shares.size() > max_causes) {
    std::stable_sort(shares.begin(), shares.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    shares.resize(max_causes);
  }
  std::string text;
  for (const auto& [share, cause] : shares)
    text += (text.empty() ? "waits: " : ", ") + std::string(cause) + fmt::format(" {:.0f} %", share);
  return text;
}

std::string skipped_text(const StepProgress& now) {
  if (!now.skipped) return "";
  return fmt::format("(skipped: gradients not finite{})",
                     now.loss_scale != 0 ? ", loss scale " + shortest(now.loss_scale) : "");
}

std::string written_text(const StepProgress& now) {
  return now.written_bytes < 0 ? "" : "written " + bytes_text(now.written_bytes);
}

std::string in_colour(std::string_view colour, const std::string& text) {
  return std::string(colour) + text + std::string(kPlainColour);
}

// Appends the fields that fit into `max_columns` columns.
std::string with_fields(std::string text, const std::vector<std::string>& fields, std::size_t max_columns) {
  for (const std::string& field : fields)
    if (!field.empty() && text.size() + 2 + field.size() <= max_columns) text += "  " + field;
  return text;
}

// mpirun gives rank 0 a terminal of its own, also if its own output is a file.
std::string progress_mode() {
  if (const char* set = std::getenv("ZR_PROGRESS"); set && *set) return set;
  return is_terminal(STDOUT_FILENO) && !std::getenv("OMPI_COMM_WORLD_RANK") ? "tty" : "plain";
}

}  // namespace

std::string progress_line(const StepProgress& now) {
  std::string memory;
  for (const std::string& tier : memory_texts(now)) memory += (memory.empty() ? "memory " : ", ") + tier;
  return with_fields("step " + count_text(now),
                     {fmt::format("loss {:.4f}", now.loss), fmt::format("lr {:.2e}", now.lr),
                      fmt::format("{:.0f} {}/s", now.rate, now.unit), "left " + duration_text(now.seconds_left), memory,
                      waits_text(now, now.waits.size()), written_text(now), skipped_text(now)},
                     std::string::npos);
}

std::string progress_on_terminal(const StepProgress& now, int columns, bool colours) {
  const auto max_columns = static_cast<std::size_t>(std::max(columns - 1, 0));
  const double fraction = now.steps > 0 ? static_cast<double>(now.step) / static_cast<double>(now.steps) : 1;
  std::string text = count_text(now) + fmt::format("  {:3.0f} %", std::floor(100 * fraction));
  std::string bar = progress_bar(fraction, std::clamp(columns / 6, 10, 30));
  if (bar.size() + 1 + text.size() > max_columns) bar.clear();
  const std::size_t for_text = bar.empty() ? max_columns : max_columns - bar.size() - 1;
  const std::string skipped = skipped_text(now);
  text = with_fields(text,
                     {fmt::format("loss {:.4f}", now.loss), "left " + duration_text(now.seconds_left),
                      fmt::format("{:.0f} {}/s", now.rate, now.unit), skipped},
                     for_text);
  for (const std::string& tier : memory_texts(now)) {
    const std::size_t before = text.size();
    text = with_fields(text, {tier}, for_text);
    if (text.size() == before) break;
  }
  for (std::size_t causes = now.waits.size(); causes > 0; --causes) {
    const std::size_t before = text.size();
    text = with_fields(text, {waits_text(now, causes)}, for_text);
    if (text.size() > before) break;
  }
  text = with_fields(text, {written_text(now), fmt::format("lr {:.2e}", now.lr)}, for_text);
  text.resize(std::min(text.size(), max_columns));
  if (colours) {
    const auto at = skipped.empty() ? text.npos : text.find(skipped);
    if (at != text.npos) text = text.substr(0, at) + in_colour(kYellow, skipped) + text.substr(at + skipped.size());
    if (!bar.empty()) bar = in_colour(kGreen, bar);
  }
  return bar.empty() ? text : fmt::format("{} {}", bar, text);
}

bool progress_wanted() {
  const char* set = std::getenv("ZR_PROGRESS");
  return !set || std::string_view(set) != "off";
}

ProgressDisplay::ProgressDisplay(bool shows) {
  if (!shows || !progress_wanted()) return;
  const std::string mode = progress_mode();
  const auto colon = mode.find(':');
  const bool terminal = mode.substr(0, colon) == "tty";
  mode_ = terminal ? Mode::terminal : Mode::lines;
  if (terminal && colon != mode.npos) device_ = mode.substr(colon + 1);
  colours_ = terminal && colours_wanted();
  if (terminal) set_current_line(this);
}

ProgressDisplay::~ProgressDisplay() {
  remove_current_line(this);
  const MutexLock lock(mutex_);
  if (bar_.empty()) return;
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

bool ProgressDisplay::due() const {
  const double pause = mode_ == Mode::terminal ? 0.1 : 5.0;
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - shown_;
  return mode_ != Mode::none && since.count() >= pause;
}

void ProgressDisplay::show(const StepProgress& now) {
  if (mode_ == Mode::none) return;
  shown_ = std::chrono::steady_clock::now();
  const MutexLock lock(mutex_);
  std::string text;
  if (mode_ == Mode::lines) {
    text = progress_line(now) + "\n";
  } else {
    const int columns = device_.empty() ? terminal_columns(STDOUT_FILENO) : terminal_columns(device_);
    bar_ = progress_on_terminal(now, columns, colours_);
    text = std::string(kBarBegin) + bar_;
    if (now.step == now.steps) {
      text += "\n";  // the last bar stays
      bar_.clear();
    } else {
      text += kBarEnd;
      bar_ += kBarEnd;
    }
  }
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

void ProgressDisplay::note(const std::string& line) {
  if (mode_ == Mode::none) return;
  const MutexLock lock(mutex_);
  std::printf("%s%s\n", mode_ == Mode::terminal ? std::string(kClearLine).c_str() : "", line.c_str());
  std::fflush(stdout);
  bar_.clear();
}

void ProgressDisplay::erase() {
  const MutexLock lock(mutex_);
  if (bar_.empty()) return;
  std::fputs(std::string(kClearLine).c_str(), stdout);
  std::fflush(stdout);
}

void ProgressDisplay::draw() {
  const MutexLock lock(mutex_);
  if (bar_.empty()) return;
  std::fputs(bar_.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace zr::host::run
