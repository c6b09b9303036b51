// The life of a component: module startup (once), create with the values of its table, destroy, module shutdown.
#include <fmt/format.h>

#include <map>

#include "base/error.hpp"
#include "plugin/float_environment.hpp"
#include "plugin/plugin_host.hpp"
#include "zr/mutex.hpp"

namespace zr::host::plugin {

namespace {

struct RunningModules {
  Mutex mutex;
  std::map<const zr_module*, int> count ZR_GUARDED_BY(mutex);
};
RunningModules& running_modules() {
  static auto* all = new RunningModules;
  return *all;
}

// Startup runs before the first create, shutdown after the last destroy; both may run several times.
void start(const zr_module* module, const std::string& call_name) {
  RunningModules& running = running_modules();
  const MutexLock lock(running.mutex);
  if (running.count[module] == 0 && module->startup)
    call_and_check(call_name, [&](zr_error* error) { return module->startup(error); });
  ++running.count[module];
}

void stop(const zr_module* module) {
  RunningModules& running = running_modules();
  const MutexLock lock(running.mutex);
  if (--running.count[module] == 0 && module->shutdown)
    call_plugin_void(fmt::format("plug-in '{}': shutdown", module->name), module->shutdown);
}

// The plug-in's text may not name the missing services; the host knows which ones it requested.
std::string with_missing_services(const Error& failure, const std::vector<std::string>& missing_services) {
  std::string text = failure.what();
  std::string ids;
  for (const auto& id : missing_services)
    if (text.find(id) == text.npos) ids += (ids.empty() ? "" : ", ") + id;
  if (!ids.empty()) text += fmt::format(" (it requested {}, which this engine does not offer)", ids);
  return missing_services.empty() ? text : text + "; install a newer zeroth, or a plug-in for this one";
}

}  // namespace

Instance::Instance(PluginHost& host, const Component& component, const config::JobConfig& config,
                   const std::string& table)
    : component_(component) {
  const FloatEnvironmentGuard environment;
  start(component.module, call_text("startup"));
  host.take_missing_services();
  const ConfigView view(config.table(table));
  zr_code code = ZR_OK;
  try {
    call("create",
         [&](zr_error* error) { return code = component.table->create(host.abi(), view.abi(), &self_, error); });
    if (!self_)
      fail_internal(call_text("create") + " reported success, but left *self null; this is a bug in the plug-in");
    if (const std::string change = environment.change(); !change.empty())
      fail_internal(fmt::format("{} changed how this thread computes: {}; this is a bug in the plug-in",
                                call_text("create"), change));
  } catch (const Error& failure) {
    stop(component.module);
    if (code != ZR_UNSUPPORTED) throw;
    fail_like(failure, with_missing_services(failure, host.take_missing_services()));
  }
}

Instance::~Instance() {
  call_plugin_void(call_text("destroy"), [&] { component_.table->destroy(self_); });
  stop(component_.module);
}

std::string Instance::call_text(const char* call) const {
  return fmt::format("{} '{}' ({}): {}", role_of(component_), component_.table->id, component_.file.string(), call);
}

}  // namespace zr::host::plugin
