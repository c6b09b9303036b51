#include "api/guarded.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>

#include "base/log.hpp"
#include "control/control.hpp"
#include "zr/program.hpp"

namespace zr {

namespace {
std::atomic<bool> device_in_use{false};
std::atomic<std::terminate_handler> terminate_before{nullptr};

void flush_and_end(host::control::ExitFunction end, int code) {
  std::cout.flush();
  std::fflush(nullptr);
  end(code);
}

// For an exception that nothing can catch: a destructor has thrown it, or a thread of the program.
void report_and_end() {
  static std::atomic_flag reported;
  const host::control::ExitFunction end = host::control::exit_function();
  if (std::current_exception() && end && !reported.test_and_set()) flush_and_end(end, host::report_program_exception());
  if (const std::terminate_handler before = terminate_before) before();  // by default, it aborts the process
}

void end_at_exit(int code, void* end) { flush_and_end(reinterpret_cast<host::control::ExitFunction>(end), code); }
}  // namespace

void note_device_in_use() { device_in_use = true; }

int guarded_run(void (*call)(void*), void* ctx, void (*end)(int)) {
  const host::control::ExitFunction before = host::control::set_exit_function(end);
  const std::terminate_handler handler_before = std::set_terminate(report_and_end);
  terminate_before = handler_before;
  int code = 0;
  try {
    call(ctx);
  } catch (const ExitRequest& request) {
    code = request.exit_code;
  } catch (...) {
    code = host::report_program_exception();
    if (device_in_use && end) ::on_exit(end_at_exit, reinterpret_cast<void*>(end));
  }
  std::set_terminate(handler_before);
  host::control::set_exit_function(before);
  return code;
}

}  // namespace zr
