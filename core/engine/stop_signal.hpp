// SIGTERM and SIGINT as a wish that the engine reads between steps (checkpoint.on_signal = "save").
#pragma once

#include <signal.h>

namespace zr::host {

/// While it lives, these signals are noted and do nothing else. Any thread.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  /// The signal that came, since the first of these objects was made; 0: none.
  static int came();

 private:
  struct sigaction term_ {
  }, interrupt_{};
};

}  // namespace zr::host
