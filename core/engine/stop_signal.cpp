#include "engine/stop_signal.hpp"

namespace zr::host {

namespace {
volatile sig_atomic_t g_came = 0;
void note(int signal) { g_came = signal; }
}  // namespace

StopSignal::StopSignal() {
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGTERM, &action, &term_);
  ::sigaction(SIGINT, &action, &interrupt_);
}

StopSignal::~StopSignal() {
  ::sigaction(SIGTERM, &term_, nullptr);
  ::sigaction(SIGINT, &interrupt_, nullptr);
}

int StopSignal::came() { return g_came; }

}  // namespace zr::host
