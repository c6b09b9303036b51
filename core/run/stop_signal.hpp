// SIGTERM and SIGINT as a request to stop, which the engine reads after each step (checkpoint.on_signal = "save"). With
// ZR_USER_SIGNALS=stop, as `zeroth launch --hosts` sets it, SIGUSR1 counts as SIGTERM and SIGUSR2 as SIGINT: mpirun
// passes these on to the ranks, but kills them soon after a SIGTERM or SIGINT.
#pragma once

#include <atomic>
#include <memory>

namespace zr::host::control {
class Control;
}

namespace zr::host::run {

/// While an enabled object of this class exists, these signals are only recorded, and this rank's saves_on_signal_key()
/// in the job's store is "yes". Children that the process makes by fork() handle them as before. Any thread.
class StopSignal {
 public:
  /// `enabled`: false: signals end the process, as without this object.
  StopSignal(std::shared_ptr<control::Control> control, bool enabled);
  ~StopSignal() { disable(); }
  StopSignal(const StopSignal&) = delete;
  bool enabled() const { return enabled_; }
  /// The last signal received since the first enabled object was created, or the one whose effect the launcher requests
  /// (Control::stop_requested()); 0: none, or this object is disabled.
  int received() const;
  /// Ends the effect of this object. It does nothing if the object is disabled.
  void disable();

 private:
  const std::shared_ptr<control::Control> control_;
  std::atomic<bool> enabled_;
};

}  // namespace zr::host::run
