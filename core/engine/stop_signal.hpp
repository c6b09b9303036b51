// SIGTERM and SIGINT as a wish that the engine reads between steps (checkpoint.on_signal = "save").
#pragma once

#include <memory>

namespace zr::host {

class Control;

/// While one lives, these signals are noted and do nothing else, and the job's store says so of this rank. Any thread.
class StopSignal {
 public:
  explicit StopSignal(std::shared_ptr<Control> control);
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  /// The signal that came, since the first of these objects was made; 0: none.
  static int received();

 private:
  std::shared_ptr<Control> control_;
};

}  // namespace zr::host
