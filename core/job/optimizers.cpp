#include "job/optimizers.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "base/error.hpp"
#include "job/plan_inputs.hpp"
#include "plugin/extension.hpp"

namespace zr::host::job {

namespace {
void add_group(const plugin::Instance& optimizer, uint32_t group, const config::GroupConfig& values_of) {
  std::vector<const config::Entry*> values;
  for (const config::Entry& entry : values_of.values) values.push_back(&entry);
  const plugin::ConfigView view(values);
  const auto* api = optimizer.api<zr_optimizer_api>();
  optimizer.call("add_group",
                 [&](zr_error* error) { return api->add_group(optimizer.self(), group, view.abi(), error); });
}

const zr_partial_sums_api* partial_sums_of(const plugin::Instance& optimizer) {
  if (!optimizer.component().drafts) return nullptr;
  return plugin::extension_of<zr_partial_sums_api>(
      optimizer.component(), "zr.optimizer.partial_sums/1", sizeof(zr_partial_sums_api),
      {offsetof(zr_partial_sums_api, passes), offsetof(zr_partial_sums_api, add_up),
       offsetof(zr_partial_sums_api, update)});
}

const zr_optimizer_device_api* device_api_of(const plugin::Instance& optimizer) {
  if (!optimizer.component().drafts) return nullptr;
  return plugin::extension_of<zr_optimizer_device_api>(optimizer.component(), "zr.optimizer.device/1",
                                                       sizeof(zr_optimizer_device_api),
                                                       {offsetof(zr_optimizer_device_api, norm_blocks)});
}
}  // namespace

Optimizers::Optimizers(plugin::PluginHost& host, const plugin::ResolvedJob& job) {
  std::vector<plugin::Component> components{job.optimizer};
  components.insert(components.end(), job.group_optimizers.begin(), job.group_optimizers.end());
  for (const plugin::Component& component : components) {
    list_.push_back(std::make_unique<const plugin::Instance>(host, component, job.config, table_of(component)));
    partial_sums_.push_back(partial_sums_of(*list_.back()));
    on_device_.push_back(device_api_of(*list_.back()));
  }
  groups_.push_back({0, 0});
  std::vector<uint32_t> count(list_.size(), 0);  // groups of each optimizer so far
  for (const config::GroupConfig& group : job.config.groups()) {
    uint32_t index = 0;
    for (uint32_t i = 0; i < components.size(); ++i)
      if (components[i].table->id == group.use) index = i;
    groups_.push_back({index, ++count[index]});
    add_group(*list_[index], count[index], group);
  }
}

std::string Optimizers::ids() const {
  std::string text;
  for (const auto& optimizer : list_)
    text += (text.empty() ? "" : ", ") + std::string(optimizer->component().table->id);
  return text;
}

void Optimizers::assign(std::vector<plan::Parameter>& parameters) const {
  for (plan::Parameter& parameter : parameters) {
    parameter.optimizer = groups_[parameter.group].optimizer;
    parameter.optimizer_group = groups_[parameter.group].group;
  }
}

LocalOptimizer local_optimizer_of(const plan::PlanInput& input, const Optimizers& optimizers) {
  for (uint32_t param = 0; param < input.parameters.size(); ++param) {
    if (!(input.description(param).needs & ZR_OPT_NEEDS_LOCAL_GRADS)) continue;
    const plugin::Instance& optimizer = optimizers[input.parameters[param].optimizer];
    const auto* api = plugin::extension_of<zr_local_gradients_api>(
        optimizer.component(), "zr.optimizer.local_gradients/1", sizeof(zr_local_gradients_api),
        {offsetof(zr_local_gradients_api, gradients), offsetof(zr_local_gradients_api, plan),
         offsetof(zr_local_gradients_api, exchange)});
    if (!api)
      fail_internal(
          fmt::format("{} reports ZR_OPT_NEEDS_LOCAL_GRADS, but the library has no extension "
                      "\"zr.optimizer.local_gradients/1\": this is a bug in the plug-in",
                      optimizer.call_text("describe")));
    return {&optimizer, api};
  }
  return {};
}

const zr_optimizer_globals_api* globals_of(const plugin::Instance& optimizer) {
  if (!optimizer.component().drafts) return nullptr;
  return plugin::extension_of<zr_optimizer_globals_api>(
      optimizer.component(), "zr.optimizer.globals/1", sizeof(zr_optimizer_globals_api),
      {offsetof(zr_optimizer_globals_api, save_globals), offsetof(zr_optimizer_globals_api, load_global)});
}

}  // namespace zr::host::job
