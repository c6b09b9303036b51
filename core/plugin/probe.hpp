// Code that may end its process, tried in a child process first. Inside core/plugin.
#pragma once

#include <functional>
#include <string>

namespace zr::host {

/// Runs `load` in a child process (a fork, without exec). "" if it returned or threw there; else how the child ended,
/// with the last line it printed and the remedy. The child has ZR_PLUGIN_LOAD_SECONDS (20 unless set), then it is
/// killed with the processes it started in its group. Throws Failure(environment) if there can be no child. For a
/// process with one thread: a lock that another thread holds stays locked in the child.
std::string probe_problem(const std::function<void()>& load);

}  // namespace zr::host
