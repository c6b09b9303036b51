// The services "zr.host.job/1" and "zr.host.store/1": the job as plug-ins see it, implemented on a Control.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "control/control.hpp"
#include "plugin/plugin_host.hpp"

namespace zr::host::control {

/// Owns the service tables; must live as long as the PluginHost. Not movable.
class JobServices {
 public:
  /// `timeout`: the limit of a get() that does not specify one.
  JobServices(plugin::PluginHost& host, Control& control, std::string run_folder,
              std::chrono::milliseconds timeout = std::chrono::minutes(5));
  ~JobServices();
  JobServices(const JobServices&) = delete;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace zr::host::control
