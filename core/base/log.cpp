#include "base/log.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string_view>
#include <system_error>

#include "base/failure.hpp"
#include "base/text.hpp"

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
}  // namespace

void log(int level, const std::string& text) {
  if (level < threshold()) return;
  const char* prefix = level >= ZR_LOG_ERROR ? "error: " : level == ZR_LOG_WARN ? "warning: " : "";
  constexpr std::size_t kLongest = 64 << 10;  // the text may quote a file, of any length
  const bool cut = text.size() > kLongest;
  const std::string line = std::string("zeroth: ") + prefix + printable(cut ? text.substr(0, kLongest) : text, "\n\t") +
                           (cut ? "... (cut; " + std::to_string(text.size()) + " bytes)\n" : "\n");
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void log_as_rank(int rank) {
  if (rank > 0 && threshold() == ZR_LOG_INFO) threshold() = ZR_LOG_WARN;
}

namespace {
std::atomic<std::string (*)(const std::string&, const std::string&)> advice_of{nullptr};

// The exception's text without libtorch's C++ stack.
std::string text_of(const std::exception& error) {
  const std::string text = error.what();
  const char* stack_traces = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
  return stack_traces && std::string_view(stack_traces) == "1" ? text
                                                               : text.substr(0, text.find("\nException raised from "));
}

int report_of_host(const std::exception& error) {
  if (const auto* path = dynamic_cast<const std::filesystem::filesystem_error*>(&error)) {
    log(ZR_LOG_ERROR, std::string(path->what()) + ": check that the path exists and that this user may access it");
    return static_cast<int>(Exit::environment);
  }
  if (const auto* failed_call =
          dynamic_cast<const std::system_error*>(&error)) {  // for example, a thread that cannot start
    const bool limit = failed_call->code() == std::errc::resource_unavailable_try_again;
    log(ZR_LOG_ERROR, std::string("a system call failed: ") + failed_call->what() +
                          (limit ? "; raise the limit of processes and threads (ulimit -u, or the container's)" : ""));
    return static_cast<int>(Exit::environment);
  }
  log(ZR_LOG_ERROR, text_of(error));
  return static_cast<int>(Exit::bug);
}

int report_of_program(const std::exception& error) {
  const std::string type = type_of(error), text = text_of(error);
  const auto advice = advice_of.load();
  const std::string remedy = advice ? advice(type, text) : "";
  log(ZR_LOG_ERROR, "the program threw " + type + ": " + text + (remedy.empty() ? "" : "; " + remedy));
  const bool no_memory = type == "c10::OutOfMemoryError" || text.find("can't allocate memory") != text.npos;
  return static_cast<int>(no_memory ? Exit::environment : Exit::program);
}

int report(bool program) {
  try {
    throw;
  } catch (const Failure& failure) {
    log(ZR_LOG_ERROR, failure.what());
    return failure.code();
  } catch (const std::invalid_argument& error) {  // by convention, the program rejects its user's input
    log(ZR_LOG_ERROR, text_of(error));
    return static_cast<int>(Exit::user);
  } catch (const std::bad_alloc&) {
    log(ZR_LOG_ERROR, "out of memory; reduce the sizes of the job, or run it on a machine with more memory");
    return static_cast<int>(Exit::environment);
  } catch (const std::exception& error) {
    return program ? report_of_program(error) : report_of_host(error);
  } catch (...) {
    log(ZR_LOG_ERROR, program ? "the program threw an object that is not a std::exception"
                              : "an exception that is not a std::exception ended the program");
    return static_cast<int>(program ? Exit::program : Exit::bug);
  }
}
}  // namespace

void set_advice(std::string (*advice)(const std::string& type, const std::string& text)) { advice_of = advice; }
int report_exception() { return report(false); }
int report_program_exception() { return report(true); }

}  // namespace zr::host
