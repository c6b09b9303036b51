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
  const std::string line = std::string("zeroth: ") + prefix + printable(text, "\n\t") + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void log_as_rank(int rank) {
  if (rank > 0 && threshold() == ZR_LOG_INFO) threshold() = ZR_LOG_WARN;
}

int report_exception() {
  try {
    throw;
  } catch (const Failure& failure) {
    log(ZR_LOG_ERROR, failure.what());
    return failure.code();
  } catch (const std::invalid_argument& error) {  // a program's own word for what its user wrote
    log(ZR_LOG_ERROR, error.what());
    return static_cast<int>(Exit::user);
  } catch (const std::filesystem::filesystem_error& error) {
    log(ZR_LOG_ERROR, std::string(error.what()) + ": see that the path exists and may be used");
    return static_cast<int>(Exit::environment);
  } catch (const std::system_error& error) {  // of a thread that cannot be started, say
    const bool limit = error.code() == std::errc::resource_unavailable_try_again;
    log(ZR_LOG_ERROR, std::string("the system refused a request: ") + error.what() +
                          (limit ? "; raise the limit of processes and threads (ulimit -u, or the container's)" : ""));
    return static_cast<int>(Exit::environment);
  } catch (const std::bad_alloc&) {
    log(ZR_LOG_ERROR, "out of memory: lower the sizes of the job, or run it on a machine with more");
    return static_cast<int>(Exit::environment);
  } catch (const std::exception& error) {
    const std::string text = error.what();  // libtorch's own carry a list of addresses
    log(ZR_LOG_ERROR, text.substr(0, text.find("\nException raised from ")));
  } catch (...) {
    log(ZR_LOG_ERROR, "an exception that is no std::exception ended the program");
  }
  return static_cast<int>(Exit::bug);
}

}  // namespace zr::host
