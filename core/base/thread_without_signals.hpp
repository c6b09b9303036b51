// Threads that handle no signals: only the program's own threads do.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace zr::host {

/// Starts a thread in which all signals are blocked. Throws std::system_error.
template <class Function>
std::thread thread_without_signals(Function&& function) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } const blocked;
  return std::thread(std::forward<Function>(function));
}

}  // namespace zr::host
