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
  std::unique_ptr<RunRecorder> recorder;
  std::unique_ptr<Trace> trace;
  std::unique_ptr<StopSignal> stop_signal;
  CommVolume communication;  // of this rank
  Overlap overlap{};
  int64_t begun = 0, updates_before = 0;
  bool stopped = false;
  double loss = 0, grad_norm = 0;
};

}  // namespace zr::host
