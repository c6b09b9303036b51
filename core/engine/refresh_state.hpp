// What a session hands to the one that trains the same model with another list of parameters (zr::Engine::refresh).
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/trace.hpp"
#include "comm/comm_volume.hpp"
#include "config/config.hpp"
#include "engine/run_recorder.hpp"
#include "engine/stop_signal.hpp"
#include "engine/training_progress.hpp"

namespace zr::host {

/// How the new list of parameters differs from the old one. The same on all ranks.
struct ParameterChange {
  std::set<std::string> fresh;   // parameters that were not there, or another tensor under that name
  std::vector<Rename> renames;   // from names now to names then
  std::vector<std::string> log;  // "'x' is new"; buffers, too
  bool any = false;
};

/// Everything of a session that outlives its list of parameters.
struct RefreshState {
  ParameterChange change;
  std::string folder;  // checkpoint of the old session; deleted by the new one
  std::shared_ptr<RunRecorder> recorder;
  std::shared_ptr<Trace> trace;             // null: none
  std::shared_ptr<StopSignal> stop_signal;  // null: none
  CommVolume communication;                 // of this rank
  Overlap overlap{};
  TrainingProgress::Run run;
};

}  // namespace zr::host
