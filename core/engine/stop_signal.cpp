#include "engine/stop_signal.hpp"

#include <signal.h>

#include <cstdlib>
#include <utility>

#include "control/control.hpp"
#include "zr/mutex.hpp"

namespace zr::host::engine {

namespace {
volatile sig_atomic_t g_received = 0;
void record(int signal) { g_received = signal; }
void record_stop(int) { g_received = SIGTERM; }

// The signal that a launcher sends instead of SIGTERM, because what lies between would kill the ranks too early; 0:
// none.
int signal_of_launcher() {
  const char* set = std::getenv("ZR_STOP_SIGNAL");
  return set && std::atoi(set) == SIGUSR1 ? SIGUSR1 : 0;
}

// The process's previous handlers, and the number of enabled StopSignal objects; several may exist at a time.
struct Handlers {
  Mutex mutex;
  int users ZR_GUARDED_BY(mutex) = 0;
  struct sigaction term ZR_GUARDED_BY(mutex) {};
  struct sigaction interrupt ZR_GUARDED_BY(mutex) {};
  struct sigaction launcher ZR_GUARDED_BY(mutex) {};
};
Handlers& process_handlers() {
  static Handlers handlers;
  return handlers;
}
}  // namespace

StopSignal::StopSignal(std::shared_ptr<control::Control> control, bool enabled)
    : control_(std::move(control)), enabled_(enabled) {
  if (!enabled) return;
  Handlers& handlers = process_handlers();
  const MutexLock lock(handlers.mutex);
  if (handlers.users++ > 0) return;
  struct sigaction action {};
  action.sa_handler = record;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGTERM, &action, &handlers.term);
  ::sigaction(SIGINT, &action, &handlers.interrupt);
  action.sa_handler = record_stop;
  if (const int signal = signal_of_launcher()) ::sigaction(signal, &action, &handlers.launcher);
  control_->put(control::saves_on_signal_key(control_->rank()), "yes");
}

void StopSignal::disable() {
  if (!enabled_.exchange(false)) return;
  Handlers& handlers = process_handlers();
  const MutexLock lock(handlers.mutex);
  if (--handlers.users > 0) return;
  control_->put(control::saves_on_signal_key(control_->rank()), "no");
  ::sigaction(SIGTERM, &handlers.term, nullptr);
  ::sigaction(SIGINT, &handlers.interrupt, nullptr);
  if (const int signal = signal_of_launcher()) ::sigaction(signal, &handlers.launcher, nullptr);
}

int StopSignal::received() const { return enabled_ ? g_received : 0; }

}  // namespace zr::host::engine
