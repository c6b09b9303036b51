// The optimizers of a job: the one of [optimizer], and others that groups of [[optimizer.groups]] use.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/draft_abi.hpp"
#include "plan/plan.hpp"
#include "plugin/plugin_host.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host::job {

/// Immutable after construction.
class Optimizers {
 public:
  /// Creates the instances and adds the groups to them. Both arguments outlive the object. [control]
  Optimizers(plugin::PluginHost& host, const plugin::ResolvedJob& job);

  /// The optimizer of [optimizer].
  const plugin::Instance& main() const { return *list_[0]; }
  std::size_t size() const { return list_.size(); }
  const plugin::Instance& operator[](std::size_t i) const { return *list_[i]; }
  std::string id(std::size_t i) const { return list_[i]->component().table->id; }
  /// The ids, separated by ", ", the main one first.
  std::string ids() const;
  /// The optimizer's functions for partial sums; null if it has none.
  const zr_partial_sums_api* partial_sums(std::size_t i) const { return partial_sums_[i]; }
  /// The optimizer's functions for memory of a device; null if it has none.
  const zr_optimizer_device_api* on_device(std::size_t i) const { return on_device_[i]; }
  /// Sets each parameter's optimizer, and its group there, by its group in the configuration.
  void assign(std::vector<plan::Parameter>& parameters) const;

 private:
  struct Group {
    uint32_t optimizer, group;
  };
  std::vector<std::unique_ptr<const plugin::Instance>> list_;
  std::vector<const zr_partial_sums_api*> partial_sums_;
  std::vector<const zr_optimizer_device_api*> on_device_;
  std::vector<Group> groups_;  // by group of the configuration; the first is for parameters in no group
};

/// The optimizer of the job that needs local gradients; both members are null if none does.
struct LocalOptimizer {
  const plugin::Instance* instance = nullptr;
  const zr_local_gradients_api* api = nullptr;  // its functions for them
};
/// Throws Error if the optimizer does not have the functions.
LocalOptimizer local_optimizer_of(const plan::PlanInput& input, const Optimizers& optimizers);

/// The optimizer's functions for state that belongs to no parameter; null if it has none. [control]
const zr_optimizer_globals_api* globals_of(const plugin::Instance& optimizer);

}  // namespace zr::host::job
