// Throws zr::Error: a message tells the user what failed, where, and what to do; its subclass decides the exit code.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "zr/abi/base.h"
#include "zr/error.hpp"

namespace zr::host {

/// Sets the function of zr::set_wording(), or null. [any]
void set_wording(std::string (*wording)(const std::string& message));
/// The message in the words of the program's language: unchanged without such a function. [any]
std::string worded(const std::string& message);

/// Throws UserError: the user's input is wrong; `text` says what, where, and how to correct it.
[[noreturn]] void fail_user(const std::string& text);
/// Throws EnvironmentError: the machine lacks a resource or a file.
[[noreturn]] void fail_environment(const std::string& text);
/// Throws InternalError: an invariant of the host or of a plug-in is broken.
[[noreturn]] void fail_internal(const std::string& text);
/// Throws InternalError: "call: problem: this is a bug in the plug-in". `call`: what Instance::call_text() returns.
[[noreturn]] void fail_plugin_bug(const std::string& call, const std::string& problem);
/// Throws the subclass of Error that has this exit code; InternalError for a code of no subclass.
[[noreturn]] void fail_with(int exit_code, const std::string& text);
/// Throws an error of the same class as `error` with another text.
[[noreturn]] inline void fail_like(const Error& error, const std::string& text) { fail_with(error.exit_code(), text); }
/// The exception that fn() throws, or null.
template <class Fn>
std::exception_ptr exception_of(Fn&& fn) noexcept {
  try {
    fn();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}
/// The error that fail_with() throws, for another thread to rethrow.
std::exception_ptr error_with(int exit_code, const std::string& text);

/// An exception of the program's code that host code has called. Not a std::exception, so guard_host_call() does not
/// convert it; the public method rethrows `cause`.
struct ProgramException {
  std::exception_ptr cause;
};
/// Inside a catch block: rethrows the exception as guard_host_call() describes.
[[noreturn]] void rethrow_from_host(const std::string& call);
/// Runs host code that a program calls: a std::exception that is neither an Error nor libtorch's becomes an
/// InternalError that names `call`, so that it does not count as an exception of the program.
template <class Fn>
decltype(auto) guard_host_call(const std::string& call, Fn&& fn) {
  try {
    return fn();
  } catch (...) {
    rethrow_from_host(call);
  }
}
/// The message for an exception of the standard library that the machine caused (a path, a thread, a system call); ""
/// for any other exception.
std::string environment_problem(const std::exception& error);
/// The exception's type as C++ source names it: "std::runtime_error", "c10::Error".
std::string type_of(const std::exception& error);

/// The candidate nearest to `word` by edit distance, or "" if none is close enough.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);
/// All candidates with the smallest edit distance, in their order.
std::vector<std::string> all_nearest(std::string_view word, const std::vector<std::string>& candidates);

/// A caller-owned zr_error for a plug-in call; check() turns it into an Error.
struct CallError : zr_error {
  CallError() : zr_error{} {}
};
/// What a plug-in wrote into `error`, for a terminal or a log (see printable()); "" if there is no text.
std::string plugin_text(const zr_error& error);
/// Fills `error` for an exception with the text `what`, or "", that a plug-in threw; returns ZR_INTERNAL.
zr_code fill_escaped(zr_error* error, const char* what);
/// Logs the error of a call that cannot report one.
void log_plugin_error(const std::string& plugin_call, const zr_error& error) noexcept;
/// Writes `code` and `text` (cut to the size of zr_error::msg) into a zr_error that the host returns to a plug-in, and
/// returns `code`. A null `error` is ignored.
zr_code fill_error(zr_error* error, zr_code code, std::string_view text, int64_t native = 0);
/// Calls a function of a plug-in, which fills `error` (or null). An exception that the function throws breaks the ABI:
/// it becomes ZR_INTERNAL with a text that says so.
template <class Call>
zr_code call_plugin(zr_error* error, Call&& call) {
  try {
    return call();
  } catch (const Error&) {  // of a function of the host that the plug-in called
    throw;
  } catch (const std::exception& escaped) {
    return fill_escaped(error, escaped.what());
  } catch (...) {
    return fill_escaped(error, "");
  }
}
/// Calls a function of a plug-in that cannot report an error; an exception is logged with `plugin_call`.
template <class Call>
void call_plugin_void(const std::string& plugin_call, Call&& call) noexcept {
  CallError error;
  try {
    call();
  } catch (const std::exception& escaped) {
    log_plugin_error(plugin_call, (fill_escaped(&error, escaped.what()), error));
  } catch (...) {
    log_plugin_error(plugin_call, (fill_escaped(&error, ""), error));
  }
}
/// Throws unless code is ZR_OK. ZR_INVALID -> user, ZR_UNSUPPORTED/NOMEM/IO -> environment,
/// ZR_COMM/TIMEOUT/CANCELLED/MISMATCH -> peer_lost, else bug. `plugin_call` names plug-in and call; the message is
/// "plugin_call: text".
void check(zr_code code, const zr_error& error, std::string_view plugin_call);
/// Calls fn(zr_error*), which calls a function of a plug-in. Throws as check() does.
template <class Fn>
void call_and_check(std::string_view plugin_call, Fn&& fn) {
  CallError error;
  check(call_plugin(&error, [&] { return fn(&error); }), error, plugin_call);
}

}  // namespace zr::host
