// A failure whose message tells the user what failed, where, and what to do. Its class decides the exit code.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "zr/abi/base.h"

namespace zr::host {

enum class Exit { program = 1, user = 2, environment = 3, peer_lost = 4, bug = 70 };

class Failure : public std::runtime_error {
 public:
  Failure(Exit exit, const std::string& text) : std::runtime_error(text), exit_(exit) {}
  Exit exit() const { return exit_; }
  int code() const { return static_cast<int>(exit_); }

 private:
  Exit exit_;
};

/// Throws Failure(Exit::user): the user's input is wrong; `text` says what, where, and how to correct it.
[[noreturn]] void fail_user(const std::string& text);
/// Throws Failure(Exit::environment): the machine lacks a resource or a file.
[[noreturn]] void fail_environment(const std::string& text);
/// Throws Failure(Exit::bug): an invariant of the host or of a plug-in is broken.
[[noreturn]] void fail_bug(const std::string& text);

/// Inside a catch block: rethrows the exception as guard_host_call() describes.
[[noreturn]] void rethrow_from_host(const std::string& call);
/// Runs host code that a program calls: a std::exception that is neither a Failure nor libtorch's becomes a
/// Failure(Exit::bug) that names `call`, so that it does not count as an exception of the program.
template <class Fn>
decltype(auto) guard_host_call(const std::string& call, Fn&& fn) {
  try {
    return fn();
  } catch (...) {
    rethrow_from_host(call);
  }
}
/// The exception's type as C++ source names it: "std::runtime_error", "c10::Error".
std::string type_of(const std::exception& error);

/// The candidate nearest to `word` by edit distance, or "" if none is close enough.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);
/// All candidates with the smallest edit distance, in their order.
std::vector<std::string> all_nearest(std::string_view word, const std::vector<std::string>& candidates);

/// A caller-owned zr_error for a plug-in call; check() turns it into a Failure.
struct CallError : zr_error {
  CallError() : zr_error{} { size = sizeof(zr_error); }
};
/// Throws unless code is ZR_OK. ZR_INVALID -> user, ZR_UNSUPPORTED/NOMEM/IO -> environment, ZR_COMM/TIMEOUT/CANCELLED
/// -> peer_lost, else bug. `who` names plug-in and call; the message is "who: text".
void check(zr_code code, const zr_error& error, std::string_view who);

}  // namespace zr::host
