#include "run/stop_signal.hpp"

#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <string_view>
#include <utility>

#include "control/control.hpp"
#include "zr/mutex.hpp"

namespace zr::host::run {

namespace {
volatile sig_atomic_t g_received = 0;
void record(int signal) { g_received = signal; }
void record_for_launcher(int signal) { g_received = signal == SIGUSR1 ? SIGTERM : SIGINT; }

bool takes_launcher_signals() {
  const char* set = std::getenv("ZR_USER_SIGNALS");
  return set && std::string_view(set) == "stop";
}

// The process's previous handlers, and the number of enabled StopSignal objects; several may exist at a time.
struct Handlers {
  Mutex mutex;
  int users ZR_GUARDED_BY(mutex) = 0;
  struct sigaction term ZR_GUARDED_BY(mutex) {};
  struct sigaction interrupt ZR_GUARDED_BY(mutex) {};
  struct sigaction user1 ZR_GUARDED_BY(mutex) {};
  struct sigaction user2 ZR_GUARDED_BY(mutex) {};
};
Handlers& process_handlers() {
  static auto* handlers = new Handlers;  // never destroyed: engines may be destroyed after statics
  return *handlers;
}

void restore(const Handlers& handlers) ZR_NO_THREAD_SAFETY_ANALYSIS {  // the caller holds the mutex, or has no threads
  ::sigaction(SIGTERM, &handlers.term, nullptr);
  ::sigaction(SIGINT, &handlers.interrupt, nullptr);
  if (!takes_launcher_signals()) return;
  ::sigaction(SIGUSR1, &handlers.user1, nullptr);
  ::sigaction(SIGUSR2, &handlers.user2, nullptr);
}

// A child of fork(), such as a process that loads data, has no step to finish: signals end it as they end others.
void restore_in_child() ZR_NO_THREAD_SAFETY_ANALYSIS {  // only this thread is left
  if (process_handlers().users > 0) restore(process_handlers());
  g_received = 0;
}
}  // namespace

StopSignal::StopSignal(std::shared_ptr<control::Control> control, bool enabled)
    : control_(std::move(control)), enabled_(enabled) {
  if (!enabled) return;
  Handlers& handlers = process_handlers();
  const MutexLock lock(handlers.mutex);
  if (handlers.users++ > 0) return;
  static const int registered = ::pthread_atfork(nullptr, nullptr, restore_in_child);
  static_cast<void>(registered);
  struct sigaction action {};
  action.sa_handler = record;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGTERM, &action, &handlers.term);
  ::sigaction(SIGINT, &action, &handlers.interrupt);
  if (takes_launcher_signals()) {
    action.sa_handler = record_for_launcher;
    ::sigaction(SIGUSR1, &action, &handlers.user1);
    ::sigaction(SIGUSR2, &action, &handlers.user2);
  }
  control_->put(control::stops_on_request_key(control_->rank()), "yes");
  control_->put(control::saves_on_signal_key(control_->rank()), "yes");
}

void StopSignal::disable() {
  if (!enabled_.exchange(false)) return;
  Handlers& handlers = process_handlers();
  const MutexLock lock(handlers.mutex);
  if (--handlers.users > 0) return;
  control_->put(control::saves_on_signal_key(control_->rank()), "no");
  restore(handlers);
}

int StopSignal::received() const {
  if (!enabled_) return 0;
  return g_received ? g_received : control_->stop_requested();
}

}  // namespace zr::host::run
