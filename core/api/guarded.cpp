#include "api/guarded.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <iostream>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/process_exit.hpp"
#include "control/control.hpp"
#include "zr/program.hpp"

namespace zr {

namespace {
std::atomic<bool> device_in_use{false};
std::atomic<std::terminate_handler> other_handler{nullptr};  // the one before report_and_end

// Another thread that waits for input or output may hold the lock of its stream, so the flush has a limit.
void flush_and_end(host::control::ExitFunction end, int code) {
  try {
    std::packaged_task<void()> flush([] {
      std::cout.flush();
      std::fflush(nullptr);
    });
    const std::future<void> flushed = flush.get_future();
    std::thread(std::move(flush)).detach();
    flushed.wait_for(std::chrono::seconds(1));
  } catch (const std::system_error&) {  // no further thread
  }
  end(code);
}

// For an exception that nothing can catch: a destructor has thrown it, or a thread of the program. Several threads may
// throw at once if a device is lost; the first one ends the process.
void report_and_end() {
  static std::atomic<std::thread::id> reporting{std::thread::id()};
  const host::control::ExitFunction end = host::control::exit_function();
  if (std::current_exception() && end) {
    std::thread::id first;
    if (reporting.compare_exchange_strong(first, std::this_thread::get_id()))
      flush_and_end(end, host::report_program_exception());
    while (first != std::thread::id() && first != std::this_thread::get_id())
      std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  if (const std::terminate_handler other = other_handler) other();  // by default, it aborts the process
}

void end_at_exit(int code, void* end) {
  if (code != 0) flush_and_end(reinterpret_cast<host::control::ExitFunction>(end), code);
}
}  // namespace

void note_device_in_use() { device_in_use = true; }

void report_failure() { host::note_failure(); }

void note_interrupt() { host::note_interrupt(); }

void set_wording(std::string (*wording)(const std::string& message)) { host::set_wording(wording); }

int guarded_run(void (*call)(void*), void* ctx, void (*end)(int)) {
  const host::control::ExitFunction before = host::control::set_exit_function(end);
  const std::terminate_handler handler_before = std::set_terminate(report_and_end);
  if (handler_before != report_and_end) other_handler = handler_before;  // else another call is running
  int code = 0;
  try {
    call(ctx);
    if (host::take_unwritten_file()) code = exit_code::environment;
  } catch (const ExitRequest& request) {
    code = request.exit_code;
  } catch (...) {
    code = host::report_program_exception();
    if (device_in_use && end) ::on_exit(end_at_exit, reinterpret_cast<void*>(end));
  }
  if (std::get_terminate() == report_and_end) std::set_terminate(handler_before);  // else the program has set one
  host::control::set_exit_function(before);
  return code;
}

}  // namespace zr
