#include "base/error.hpp"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <numeric>
#include <system_error>
#include <typeinfo>

#include "base/log.hpp"
#include "base/text.hpp"

namespace zr::host {

namespace {
std::atomic<std::string (*)(const std::string&)> wording_of_language{nullptr};
}  // namespace

void set_wording(std::string (*wording)(const std::string& message)) { wording_of_language = wording; }
std::string worded(const std::string& message) {
  const auto wording = wording_of_language.load();
  return wording ? wording(message) : message;
}

void fail_user(const std::string& text) { throw UserError(worded(text)); }
void fail_environment(const std::string& text) { throw EnvironmentError(worded(text)); }
void fail_internal(const std::string& text) { throw InternalError(worded(text)); }

void fail_plugin_bug(const std::string& call, const std::string& problem) {
  fail_internal(fmt::format("{}: {}: this is a bug in the plug-in", call, problem));
}

void fail_with(int exit_code, const std::string& text) {
  switch (exit_code) {
    case exit_code::user: fail_user(text);
    case exit_code::environment: fail_environment(text);
    case exit_code::peer_lost: throw PeerLostError(worded(text));
    default: fail_internal(text);
  }
}

std::exception_ptr error_with(int exit_code, const std::string& text) {
  return exception_of([&] { fail_with(exit_code, text); });
}

std::string type_of(const std::exception& error) {
  const char* mangled = typeid(error).name();
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                         &std::free);
  return name ? name.get() : mangled;
}

std::string environment_problem(const std::exception& error) {
  if (dynamic_cast<const std::filesystem::filesystem_error*>(&error))
    return fmt::format("{}: check that the path exists and that this user may access it", error.what());
  if (const auto* failed = dynamic_cast<const std::system_error*>(&error)) {  // for example, a thread that cannot start
    const bool limit = failed->code() == std::errc::resource_unavailable_try_again;
    return std::string("a system call failed: ") + failed->what() +
           (limit ? "; raise the limit of processes and threads (ulimit -u, or the container's)" : "");
  }
  return "";
}

void rethrow_from_host(const std::string& call) {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    fail_environment(call +
                     ": out of memory; lower train.micro_batch, raise job.ranks, or set offload.optimizer and "
                     "offload.gradients to a tier");
  } catch (const std::exception& error) {
    const std::string type = type_of(error);
    if (type.starts_with("c10::") || type.starts_with("torch::")) throw;
    if (const std::string problem = environment_problem(error); !problem.empty())
      fail_environment(fmt::format("{}: {}", call, problem));
    fail_internal(fmt::format("{}: {}: {}", call, type, error.what()));
  }
}

namespace {
// Edit distance where swapping two neighbours counts as one edit.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) now[j] = std::min(now[j], before[j - 2] + 1);
    }
    before = last;
    last = now;
  }
  return last[b.size()];
}
}  // namespace

std::vector<std::string> all_nearest(std::string_view word, const std::vector<std::string>& candidates) {
  constexpr std::size_t kLongest = 200;  // no name is longer; the cost is the product of both lengths
  if (word.size() > kLongest) return {};
  std::vector<std::string> best;
  std::size_t smallest = word.size() < 4 ? 1 : std::max<std::size_t>(2, word.size() / 3);
  for (const auto& candidate : candidates) {
    const std::size_t d = distance(word, candidate);
    if (d > smallest || d >= std::max(word.size(), candidate.size())) continue;
    if (d < smallest) best.clear();
    smallest = d;
    if (std::find(best.begin(), best.end(), candidate) == best.end()) best.push_back(candidate);
  }
  return best;
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const auto found = all_nearest(word, candidates);
  return found.empty() ? "" : found.front();
}

zr_code fill_error(zr_error* error, zr_code code, std::string_view text, int64_t native) {
  if (!error) return code;
  error->code = code;
  error->native = native;
  const std::size_t length = std::min(text.size(), sizeof error->msg - 1);
  text.copy(error->msg, length);
  error->msg[length] = '\0';
  return code;
}

std::string plugin_text(const zr_error& error) {
  return printable(std::string_view(error.msg, ::strnlen(error.msg, sizeof error.msg)), "\n");
}

zr_code fill_escaped(zr_error* error, const char* what) {
  const std::string cause = *what ? fmt::format(": {}", what) : "";
  return fill_error(error, ZR_INTERNAL,
                    fmt::format("threw an exception across the C ABI{}; this is a bug in the plug-in", cause));
}

void log_plugin_error(const std::string& plugin_call, const zr_error& error) noexcept {
  try {
    log(ZR_LOG_ERROR, fmt::format("{}: {}", plugin_call, plugin_text(error)));
  } catch (const std::exception&) {  // no memory for the message
  }
}

void check(zr_code code, const zr_error& error, std::string_view plugin_call) {
  if (code == ZR_OK) return;
  std::string what = plugin_text(error);
  if (what.empty()) what = fmt::format("error code {}", code);
  const std::string text = fmt::format("{}: {}", plugin_call, what);
  switch (code) {
    case ZR_INVALID: fail_user(text);
    case ZR_UNSUPPORTED:
    case ZR_NOMEM:
    case ZR_IO: fail_environment(text);
    case ZR_COMM:
    case ZR_TIMEOUT:
    case ZR_CANCELLED:
    case ZR_MISMATCH: throw PeerLostError(text);
    default: fail_internal(text);
  }
}

}  // namespace zr::host
