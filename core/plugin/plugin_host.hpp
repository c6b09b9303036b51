// The zr_host that plug-ins see: services by id, and instances created on it. One per Engine.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/ledger.hpp"
#include "base/thread_pool.hpp"
#include "config/config.hpp"
#include "plugin/plugin.hpp"
#include "zr/abi/host.h"

namespace zr::host {

class PluginHost {
 public:
  /// Offers config, memory and tasks; other rooms offer theirs before an instance is created. Refers to ledger and
  /// pool.
  PluginHost(Ledger& ledger, ThreadPool& pool);
  /// After the last Instance. Memory that plug-ins did not give back is freed, with a warning.
  ~PluginHost();
  PluginHost(const PluginHost&) = delete;
  /// `table` must outlive the PluginHost.
  void offer(const std::string& id, const void* table);
  /// Lives as long as the process, as plug-ins are promised; once the PluginHost is gone it offers nothing.
  const zr_host* abi() const;
  /// What services reach their own state through: service tables receive `const zr_host*`, from_abi gives the
  /// PluginHost back.
  static PluginHost& from_abi(const zr_host* host);
  /// A room's own pointer, kept for its service ("comm", "control"); null if never set.
  void* context(const std::string& id) const;
  void set_context(const std::string& id, void* context);

  /// As given to the constructor.
  Ledger& ledger();
  ThreadPool& pool();
  /// Services that were asked for and are not offered, since the last call; emptied.
  std::vector<std::string> take_missing_services();
  /// What the memory service last refused memory with, as the Failure it is on this side; null if nothing. Clears it.
  std::exception_ptr take_failure();
  /// The memory service's books: what is lent to plug-ins. [any]
  struct Memory;
  Memory& memory();  // see above

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A created component; destroys it. Module startup and shutdown are counted per process.
class Instance {
 public:
  /// Calls startup (once a module) and create with the values of table "<role>.<id>". Throws naming plug-in and
  /// message.
  Instance(PluginHost& host, const Component& component, const JobConfig& config, const std::string& table);
  ~Instance();
  Instance(const Instance&) = delete;
  void* self() const { return self_; }
  const Component& component() const { return component_; }
  template <class Api>
  const Api* api() const {
    return static_cast<const Api*>(component_.table->api);
  }
  std::string who(const char* call) const;  // "optimizer 'id' (path): step"

 private:
  Component component_;
  void* self_ = nullptr;
};

/// A zr_config over entries, for create() and add_group(). Valid while the entries live.
class ConfigView {
 public:
  explicit ConfigView(std::vector<const Entry*> entries);
  ~ConfigView();
  const zr_config* abi() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zr::host
