#include "plugin/plugin_selection.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "base/error.hpp"

namespace zr::host::plugin {

namespace {

// Plug-ins for the memory of a device are in the folder of its type, below the folders of the others.
const Registry& registry_of(Role role, const std::string& id, const Registry& all, const Registry& of_device) {
  const bool is_path = !id.empty() && id[0] == '/';
  return !is_path && of_device.exists(role, id) ? of_device : all;
}

Component load(Role role, const config::Document& document, const Registry& registry, PluginSelection& selection) {
  const std::string name(name_of(role));
  config::Origin origin;
  const std::string id = document.chosen(name, &origin);
  const bool standard = origin.from == config::Origin::From::key_default;
  // If the name of the role is misspelt in the file, report that, not the missing default.
  if (const std::string misspelt = standard && !registry.exists(role, id) ? document.misspelt(name) : "";
      !misspelt.empty())
    fail_user(misspelt);
  Component component = registry.load(role, id, standard ? document.file() + " (default)" : origin.text());
  const auto keys =
      config::keys_of(component.table->keys, component.table->n_keys, fmt::format("{}.{}", name, component.table->id));
  selection.keys.insert(selection.keys.end(), keys.begin(), keys.end());
  std::erase(selection.not_loaded[name], component.table->id);
  return component;
}

// The plug-in of this id, or nothing if it does not exist or cannot be loaded.
std::optional<Component> load_if_valid(Role role, const std::string& id, const Registry& registry) {
  try {
    if (registry.exists(role, id)) return registry.load(role, id, "");
  } catch (const Error&) {  // the job does not need it
  }
  return {};
}

// The default of a key as TOML text; null if the plug-in has no such key, or the key has no default.
const char* default_of(const Component& plugin, std::string_view key) {
  for (uint32_t i = 0; i < plugin.table->n_keys; ++i)
    if (plugin.table->keys[i]->name == key) return plugin.table->keys[i]->def;
  return nullptr;
}

// Fails if this optimizer for a device has other defaults than the one for host memory that has the same id: the same
// file would train differently on the device.
void check_defaults(const Component& optimizer, const Registry& for_host) {
  const std::optional<Component> other = load_if_valid(Role::optimizer, optimizer.table->id, for_host);
  if (!other) return;
  for (uint32_t i = 0; i < optimizer.table->n_keys; ++i) {
    const zr_key& key = *optimizer.table->keys[i];
    const char* there = default_of(*other, key.name);
    if (key.def && there && std::string_view(key.def) != there)
      fail_environment(fmt::format(
          "{}: the default of optimizer.{}.{} is {}, but {} in {}, so that a job would train differently on "
          "this device than on the CPU: install both libraries in the same version",
          optimizer.file.string(), optimizer.table->id, key.name, key.def, there, other->file.string()));
  }
}

// Loads the optimizers that groups use in place of the job's.
void load_group_optimizers(const config::Document& document, const Registry& registry, const Registry& of_device,
                           PluginSelection& selection) {
  for (const config::Setting<std::string>& use : document.group_optimizers()) {
    if (use.value.empty() || use.value[0] == '/') continue;  // check() reports it
    const Registry& from = registry_of(Role::optimizer, use.value, registry, of_device);
    const Component optimizer = from.load(Role::optimizer, use.value, use.origin.text());
    if (&from == &of_device) check_defaults(optimizer, registry);
    if (use.value == selection.optimizer.table->id) continue;  // also if the file names that one by its path
    const auto keys = config::keys_of(optimizer.table->keys, optimizer.table->n_keys,
                                      fmt::format("optimizer.{}", optimizer.table->id));
    selection.keys.insert(selection.keys.end(), keys.begin(), keys.end());
    std::erase(selection.not_loaded["optimizer"], optimizer.table->id);
    selection.group_optimizers.push_back(optimizer);
  }
}

// True if the file names the plug-in or has a table for it. It must then exist and have valid keys, needed or not.
bool is_given(const config::Document& document, Role role) {
  const std::string name(name_of(role));
  config::Origin origin;
  const std::string id = document.chosen(name, &origin);
  return origin.from != config::Origin::From::key_default || document.has_table(name, id);
}

// Loads the tiers of the training state: first those of offload.tiers, in its order.
void load_tiers(const config::Document& document, const Registry& registry, PluginSelection& selection) {
  const auto add = [&](const std::string& id, const config::Origin& origin) {
    const bool standard = origin.from == config::Origin::From::key_default;
    const Component tier = registry.load(Role::offload, id, standard ? document.file() + " (default)" : origin.text());
    for (const Component& loaded : selection.tiers)
      if (loaded.table == tier.table) return;
    const auto keys = config::keys_of(tier.table->keys, tier.table->n_keys, fmt::format("offload.{}", tier.table->id));
    selection.keys.insert(selection.keys.end(), keys.begin(), keys.end());
    std::erase(selection.not_loaded["offload"], tier.table->id);
    selection.tiers.push_back(tier);
  };
  const std::vector<config::Setting<config::TierChoice>> choices = document.tier_choices();
  const bool automatic = std::any_of(choices.begin(), choices.end(), [](const auto& one) { return one->automatic(); });
  const auto choice_of = [&](const std::string& id) -> const config::Setting<config::TierChoice>* {
    for (const auto& choice : choices)
      if (choice->text == id) return &choice;
    return nullptr;
  };
  const config::Setting<std::vector<std::string>> order = document.tiers();
  bool first = true;
  for (const std::string& id : order.value) {
    if (const auto* choice = choice_of(id); choice || (automatic && (first || document.has_table("offload", id))))
      add(id, choice ? choice->origin : order.origin);
    else if (order.origin.from != config::Origin::From::key_default)
      registry.load(Role::offload, id, order.origin.text());  // not needed, but a wrong name is an error
    first = false;
  }
  for (const auto& choice : choices)
    if (choice->names_tier()) add(choice->text, choice.origin);
}

// Loads the plug-ins that are not selected, but have a table in the file or on the command line, for their keys. The
// job does not need them, so one that cannot be loaded is not an error.
void load_unselected(const config::Document& document, const Registry& registry, const Registry& of_device,
                     PluginSelection& selection) {
  for (const Role role : {Role::strategy, Role::optimizer, Role::communicator, Role::offload}) {
    const std::string name(name_of(role));
    std::erase_if(selection.not_loaded[name], [&](const std::string& id) {
      if (!document.has_table(name, id)) return false;
      try {
        const Component plugin = registry_of(role, id, registry, of_device).load(role, id, document.file());
        selection.unselected.push_back(
            {name, id, config::keys_of(plugin.table->keys, plugin.table->n_keys, fmt::format("{}.{}", name, id))});
        return true;
      } catch (const Error& error) {
        selection.unselected.push_back({name, id, {}, error.what()});
        return false;
      }
    });
  }
}

// The communicator with memory of the device that `auto` chooses, or "". The default for host memory has priority; then
// one that connects hosts, because others may move memory of the device through host memory; then the order of ids.
std::string communicator_for_device(const config::Document& document, const Registry& of_device) {
  std::vector<std::string> ids = of_device.ids(Role::communicator);
  const std::string first = document.chosen("communicator");
  const auto rest = std::stable_partition(ids.begin(), ids.end(), [&](const std::string& id) { return id == first; });
  std::stable_partition(rest, ids.end(), [&](const std::string& id) { return of_device.connects_hosts(id); });
  for (const std::string& id : ids)
    if (!document.several_hosts() || of_device.connects_hosts(id)) return id;
  return "";
}

// Sets what communicator = "auto" means for several ranks on a device; returns the reason.
std::string choose_communicator(config::Document& document, const Registry& of_device) {
  const std::string device = document.device().value;
  const std::string type = device.substr(0, device.find(':')), id = communicator_for_device(document, of_device);
  const std::vector<std::string> inexact = document.inexact_collectives();
  if (document.several_hosts() && !inexact.empty())
    return fmt::format("collectives between hosts may be inexact ({}){}", fmt::join(inexact, ", "),
                       id.empty() ? "" : fmt::format("; communicator = \"{}\" is exact", id));
  const std::string ranks = document.several_hosts() ? "ranks on several hosts" : "ranks on one host";
  if (id.empty() && of_device.exists(Role::communicator, document.chosen("communicator")))
    return fmt::format("no communicator exchanges memory of '{}' directly between {}, so it passes through host memory",
                       type, ranks);
  if (id.empty())
    return fmt::format("there is no communicator with memory of '{}' for {}, so the ranks exchange host memory", type,
                       ranks);
  document.set_automatic_communicator(id);
  return fmt::format("it can exchange memory of '{}' between {}, with exact results", type, ranks);
}

}  // namespace

PluginSelection select_plugins(config::Document& document, const Registry& registry, int64_t ranks) {
  PluginSelection selection;
  const Registry of_device = registry.of_device(document.device().value);
  for (const Role role : {Role::strategy, Role::optimizer, Role::communicator, Role::offload}) {
    std::vector<std::string>& ids = selection.not_loaded[std::string(name_of(role))];
    ids = registry.ids(role);
    for (const std::string& id : of_device.ids(role))
      if (!registry.exists(role, id)) ids.push_back(id);
  }
  selection.strategy = load(Role::strategy, document, registry, selection);
  const bool chooses = ranks > 1 && document.device().value != config::kCpuDevice && document.chooses_communicator();
  const std::string reason = chooses ? choose_communicator(document, of_device) : "";
  const auto registry_for = [&](Role role) -> const Registry& {
    return registry_of(role, document.chosen(std::string(name_of(role))), registry, of_device);
  };
  const Registry& optimizers = registry_for(Role::optimizer);
  selection.optimizer = load(Role::optimizer, document, optimizers, selection);
  if (&optimizers == &of_device) check_defaults(selection.optimizer, registry);
  load_group_optimizers(document, registry, of_device, selection);
  if (const bool needed = ranks > 1; needed || is_given(document, Role::communicator)) {
    const Component communicator = load(Role::communicator, document, registry_for(Role::communicator), selection);
    if (needed) selection.communicator = communicator;
    if (chooses)
      selection.communicator_choice = fmt::format("communicator = \"auto\" is '{}' ({}): {}", communicator.table->id,
                                                  communicator.file.string(), reason);
  } else {
    selection.not_loaded["communicator"].push_back(document.chosen("communicator"));
  }
  load_tiers(document, registry, selection);
  load_unselected(document, registry, of_device, selection);
  return selection;
}

ResolvedJob resolve_job(config::Document document, const Registry& registry,
                        const std::vector<config::ConfigKey>& program_keys, int world, bool knows_all_keys) {
  std::vector<config::UncheckedValue> unchecked;
  const int64_t ranks = world > 0 ? world : document.ranks();
  PluginSelection selection = select_plugins(document, registry, ranks);
  selection.keys.insert(selection.keys.end(), program_keys.begin(), program_keys.end());
  config::JobConfig config = document.check(selection.keys, world, selection.not_loaded,
                                            knows_all_keys ? nullptr : &unchecked, selection.unselected);
  return {std::move(config),      selection.strategy,
          selection.optimizer,    selection.group_optimizers,
          selection.communicator, registry.ids(Role::strategy),
          selection.tiers,        registry.ids(Role::offload),
          std::move(unchecked),   std::move(selection.communicator_choice)};
}

}  // namespace zr::host::plugin
