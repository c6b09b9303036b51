#include "base/log.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string_view>

#include "base/error.hpp"
#include "base/text.hpp"
#include "zr/mutex.hpp"

namespace zr::host {

namespace {
int from_environment() {
  const char* set = std::getenv("ZR_LOG");
  const std::string_view text = set ? set : "info";
  return text == "debug" ? ZR_LOG_DEBUG : text == "warn" ? ZR_LOG_WARN : text == "error" ? ZR_LOG_ERROR : ZR_LOG_INFO;
}
std::atomic<int>& threshold() {
  static std::atomic<int> value = from_environment();
  return value;
}

struct LineOfTerminal {
  Mutex mutex;
  CurrentLine* line ZR_GUARDED_BY(mutex) = nullptr;
};
LineOfTerminal& line_of_terminal() {
  static auto* current = new LineOfTerminal;  // never destroyed
  return *current;
}
}  // namespace

void set_current_line(CurrentLine* line) {
  LineOfTerminal& current = line_of_terminal();
  const MutexLock lock(current.mutex);
  current.line = line;
}

void remove_current_line(const CurrentLine* line) {
  LineOfTerminal& current = line_of_terminal();
  const MutexLock lock(current.mutex);
  if (current.line == line) current.line = nullptr;
}

void log(int level, const std::string& text) {
  if (level < threshold()) return;
  const char* prefix = level >= ZR_LOG_ERROR ? "error: " : level == ZR_LOG_WARN ? "warning: " : "";
  constexpr std::size_t kLongest = 64 << 10;  // the text may quote a file, of any length
  const bool cut = text.size() > kLongest;
  const std::string words = worded(cut ? text.substr(0, kLongest) : text);
  const std::string line = std::string("zeroth: ") + prefix + printable(words, "\n\t") +
                           (cut ? fmt::format("... (cut; {} bytes)\n", text.size()) : "\n");
  LineOfTerminal& current = line_of_terminal();
  const MutexLock lock(current.mutex);
  if (current.line) current.line->erase();
  std::fwrite(line.data(), 1, line.size(), stderr);
  if (current.line) current.line->draw();
}

void log_failure(const std::string& text) {
  const auto ranks = text.find("\n  rank ");
  if (ranks == text.npos) return log(ZR_LOG_ERROR, text);
  log(ZR_LOG_ERROR, kRanksTitle + text.substr(ranks));
  log(ZR_LOG_ERROR, text.substr(0, ranks));
}

void log_as_rank(int rank) {
  if (rank > 0 && threshold() == ZR_LOG_INFO) threshold() = ZR_LOG_WARN;
}

namespace {
std::atomic<std::string (*)(const std::string&, const std::string&)> advice_of{nullptr};

// The exception's text without libtorch's C++ stack. A failed check of an allocator has no line before the frames.
std::string text_of(const std::exception& error) {
  const std::string text = error.what();
  const char* stack_traces = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
  if (stack_traces && std::string_view(stack_traces) == "1") return text;
  return text.substr(0, std::min(text.find("\nException raised from "), text.find("\nframe #0: ")));
}

std::string remedy_for(const std::string& type, const std::string& text) {
  const auto advice = advice_of.load();
  return advice ? advice(type, text) : "";
}

int report_of_host(const std::exception& error) {
  if (const std::string problem = environment_problem(error); !problem.empty()) {
    log(ZR_LOG_ERROR, problem);
    return exit_code::environment;
  }
  log(ZR_LOG_ERROR, text_of(error));
  return exit_code::internal;
}

int report_of_program(const std::exception& error) {
  const std::string type = type_of(error), text = text_of(error);
  const std::string remedy = remedy_for(type, text);
  log(ZR_LOG_ERROR, fmt::format("the program threw {}: {}{}", type, text, remedy.empty() ? "" : "; " + remedy));
  const bool no_memory = type == "c10::OutOfMemoryError" || text.find("can't allocate memory") != text.npos;
  return no_memory ? exit_code::environment : exit_code::program;
}

int report(bool program) {
  try {
    throw;
  } catch (const Error& failure) {
    log_failure(failure.what());
    return failure.exit_code();
  } catch (const std::invalid_argument& error) {  // by convention, the program rejects its user's input
    log(ZR_LOG_ERROR, text_of(error));
    return exit_code::user;
  } catch (const std::bad_alloc&) {
    const std::string remedy = remedy_for("std::bad_alloc", "");
    log(ZR_LOG_ERROR, fmt::format("out of memory; {}", remedy.empty() ? "reduce the sizes of the job, or run it on a "
                                                                        "machine with more memory"
                                                                      : remedy));
    return exit_code::environment;
  } catch (const std::exception& error) {
    return program ? report_of_program(error) : report_of_host(error);
  } catch (...) {
    log(ZR_LOG_ERROR, program ? "the program threw an object that is not a std::exception"
                              : "an exception that is not a std::exception ended the program");
    return program ? exit_code::program : exit_code::internal;
  }
}
}  // namespace

void set_advice(std::string (*advice)(const std::string& type, const std::string& text)) { advice_of = advice; }
int report_exception() { return report(false); }
int report_program_exception() { return report(true); }

void log_exception_of(const std::function<void()>& fn) noexcept {
  try {
    fn();
  } catch (const std::exception& failure) {
    log(ZR_LOG_ERROR, failure.what());
  } catch (...) {
    log(ZR_LOG_ERROR, "an exception of unknown type");
  }
}

}  // namespace zr::host
