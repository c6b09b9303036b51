// Runs code that may end its process in a child process first. Internal to core/plugin.
#pragma once

#include <functional>
#include <string>

#include "plugin/plugin.hpp"

namespace zr::host::plugin {

/// Runs `load` in a child process (a fork, without exec). Returns "" if it returned or threw there; else how the child
/// ended, with the last line it printed and the remedy. After ZR_PLUGIN_LOAD_SECONDS (default 20), the child and the
/// processes in its group are killed. Throws EnvironmentError if no child can be started. Only for processes with
/// one thread: a lock that another thread holds stays locked in the child. `cause` gets crashed or timed_out. After 2
/// s, a line of the log says that it waits for `what` to load, unless that is "".
std::string probe_problem(const std::function<void()>& load, RejectionCause* cause = nullptr,
                          const std::string& what = "");

}  // namespace zr::host::plugin
