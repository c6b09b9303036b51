// SIGTERM and SIGINT as a request to stop, which the engine reads after each step (checkpoint.on_signal = "save").
#pragma once

#include <memory>

namespace zr::host::control {
class Control;
}

namespace zr::host::engine {

/// While an object of this class exists, these signals are only recorded, and this rank's saves_on_signal_key() in the
/// job's store is "yes". Any thread.
class StopSignal {
 public:
  explicit StopSignal(std::shared_ptr<control::Control> control);
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  /// The last signal received since the first object was created; 0: none.
  static int received();

 private:
  std::shared_ptr<control::Control> control_;
};

}  // namespace zr::host::engine
