// The zr_host that plug-ins see: services by id, and instances created on it. One per Engine.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "base/error.hpp"
#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "config/config.hpp"
#include "plugin/plugin.hpp"
#include "zr/abi/host.h"

namespace zr::host::plugin {

class PluginHost {
 public:
  /// Offers the config, memory and task services; other subsystems offer theirs before an instance is created. `ledger`
  /// and `pool` must outlive the PluginHost.
  PluginHost(Ledger& ledger, ThreadPool& pool);
  /// All Instances must be destroyed before. Frees memory that plug-ins did not free, with a warning.
  ~PluginHost();
  PluginHost(const PluginHost&) = delete;
  /// Offers the service table `table` under `id`; `table` must outlive the PluginHost.
  void offer(const std::string& id, const void* table);
  /// The zr_host for plug-ins. It lives until the process ends; after the PluginHost is destroyed it offers no service.
  const zr_host* abi() const;
  /// The PluginHost of a zr_host; service functions, which receive a `const zr_host*`, use it to find their state.
  static PluginHost& from_abi(const zr_host* host);
  /// The object of class T that the functions of a service work on; null if none is set. T must be a complete class.
  template <class T>
  T* context() const {
    return static_cast<T*>(context_of(typeid(T)));
  }
  /// Sets it; null clears it. The object must stay alive until then.
  template <class T>
  void set_context(T* object) {
    set_context_of(typeid(T), object);
  }

  /// The ledger and the thread pool that the constructor received.
  Ledger& ledger();
  ThreadPool& pool();
  /// Returns the ids of services that plug-ins requested but that are not offered, and clears the list.
  std::vector<std::string> take_missing_services();
  /// Returns the exception of the last failed allocation of the memory service, or null, and clears it.
  std::exception_ptr take_failure();
  /// Returns an error if memory that a plug-in allocated itself and counted exceeded a budget, or null, and clears it.
  std::exception_ptr take_excess();
  /// State of the memory service: the blocks that plug-ins hold. [any]
  struct Memory;
  Memory& memory();  // [any]

 private:
  void* context_of(const std::type_info& type) const;
  void set_context_of(const std::type_info& type, void* object);

  struct State;
  std::unique_ptr<State> state_;
};

/// A created component; destroys it. Module startup and shutdown are counted per process.
class Instance {
 public:
  /// Calls startup (once per module) and create with the values of `table` ("<role>.<id>"). Throws Error with the
  /// plug-in and its message.
  Instance(PluginHost& host, const Component& component, const config::JobConfig& config, const std::string& table);
  ~Instance();
  Instance(const Instance&) = delete;
  void* self() const { return self_; }
  const Component& component() const { return component_; }
  template <class Api>
  const Api* api() const {
    return static_cast<const Api*>(component_.table->api);
  }
  std::string call_text(const char* call) const;  // "optimizer 'id' (path): step"
  /// Calls fn(zr_error*), which calls the function `name` of the component. Throws as check() does.
  template <class Fn>
  void call(const char* name, Fn&& fn) const {
    call_and_check(call_text(name), fn);
  }

 private:
  Component component_;
  void* self_ = nullptr;
};

/// A zr_config of entries, for create() and add_group(). Valid while the entries live.
class ConfigView {
 public:
  explicit ConfigView(std::vector<const config::Entry*> entries);
  ~ConfigView();
  const zr_config* abi() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zr::host::plugin
