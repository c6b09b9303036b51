// The state that a session hands over to the next one, which trains the same model with another list of parameters
// (zr::Engine::refresh).
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/trace.hpp"
#include "comm/comm_volume.hpp"
#include "config/config.hpp"
#include "engine/training_progress.hpp"
#include "run/run_log.hpp"
#include "run/stop_signal.hpp"

namespace zr::host::engine {

/// The difference between the new list of parameters and the old one. The same on all ranks.
struct ParameterChange {
  std::set<std::string> fresh;          // new names, and old names that now denote another tensor
  std::vector<config::Rename> renames;  // from new names to old names
  std::vector<std::string> log;         // lines such as "'x' is new", for parameters and buffers
  bool any = false;                     // whether anything changed
};

/// The parts of a session that do not depend on its list of parameters.
struct RefreshState {
  ParameterChange change;
  std::string folder;  // the old session's checkpoint; the new session deletes it
  std::shared_ptr<run::RunLog> recorder;
  std::shared_ptr<Trace> trace;  // null: no trace
  std::shared_ptr<run::StopSignal> stop_signal;
  comm::CommVolume communication;  // of this rank, since the run began
  run::Overlap overlap{};
  TrainingProgress::Run run;
};

}  // namespace zr::host::engine
