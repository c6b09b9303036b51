// Checks a module's tables once after loading; the rest of the engine relies on them.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/text.hpp"
#include "base/unknown_bits.hpp"
#include "plugin/library_loader.hpp"
#include "zr/abi/communicator.h"
#include "zr/abi/offload.h"
#include "zr/abi/optimizer.h"
#include "zr/abi/strategy.h"

namespace zr::host::plugin {

namespace {

struct RequiredFunction {
  std::size_t offset;
  const char* name;
};
// The requirements for a role's table: its minimum size and the functions that may not be null.
struct TableShape {
  std::size_t size;
  std::vector<RequiredFunction> functions;
};
#define REQUIRED(api, name) \
  RequiredFunction { offsetof(api, name), #name }
const TableShape& shape_of(Role role) {  // the shapes are never destroyed
  static const auto& strategy = *new TableShape{
      ZR_SIZE_0_9(zr_strategy_api),
      {REQUIRED(zr_strategy_api, describe), REQUIRED(zr_strategy_api, plan), REQUIRED(zr_strategy_api, bind),
       REQUIRED(zr_strategy_api, grad_destination), REQUIRED(zr_strategy_api, grad_ready),
       REQUIRED(zr_strategy_api, event), REQUIRED(zr_strategy_api, grads_finish), REQUIRED(zr_strategy_api, updated)}};
  static const auto& communicator = *new TableShape{
      ZR_SIZE_0_9(zr_communicator_api),
      {REQUIRED(zr_communicator_api, open), REQUIRED(zr_communicator_api, close), REQUIRED(zr_communicator_api, caps),
       REQUIRED(zr_communicator_api, submit), REQUIRED(zr_communicator_api, abort)}};
  static const auto& optimizer = *new TableShape{
      ZR_SIZE_0_9(zr_optimizer_api),
      {REQUIRED(zr_optimizer_api, describe), REQUIRED(zr_optimizer_api, add_group), REQUIRED(zr_optimizer_api, step)}};
  static const auto& offload = *new TableShape{
      ZR_SIZE_0_9(zr_offload_api),
      {REQUIRED(zr_offload_api, open), REQUIRED(zr_offload_api, caps), REQUIRED(zr_offload_api, reserve),
       REQUIRED(zr_offload_api, release), REQUIRED(zr_offload_api, write), REQUIRED(zr_offload_api, read)}};
  switch (role) {
    case Role::strategy: return strategy;
    case Role::communicator: return communicator;
    case Role::optimizer: return optimizer;
    default: return offload;
  }
}
#undef REQUIRED

std::string too_short(const char* what, std::size_t actual, std::size_t minimum) {
  return fmt::format("{} has {} bytes, but needs at least {}", what, actual, minimum);
}

std::string api_problem(const zr_component& component, Role role) {
  const TableShape& shape = shape_of(role);
  uint32_t size = 0;
  std::memcpy(&size, component.api, sizeof size);
  if (size < shape.size) return too_short("its api table", size, shape.size);
  uint32_t reserved = 0;
  std::memcpy(&reserved, static_cast<const char*>(component.api) + sizeof size, sizeof reserved);
  if (std::string problem = reserved_problem("rsv of its api table", reserved); !problem.empty()) return problem;
  for (const RequiredFunction& required : shape.functions) {
    const void* function = nullptr;
    std::memcpy(static_cast<void*>(&function), static_cast<const char*>(component.api) + required.offset,
                sizeof function);
    if (!function)
      return fmt::format("its function '{}' is null, but every {} must have it", required.name, name_of(role));
  }
  return "";
}

std::string problem_of(const zr_key& key, Role role) {
  if (key.size < ZR_SIZE_0_9(zr_key)) return too_short("a key", key.size, ZR_SIZE_0_9(zr_key));
  const std::string where = fmt::format("key '{}': ", printable(key.name));
  for (const auto& [member, text] : {std::pair{"name", key.name}, std::pair{"default", key.def},
                                     std::pair{"choices", key.choices}, std::pair{"meaning", key.meaning}})
    if (text && find_not_utf8(text) != std::string_view::npos)
      return fmt::format("{}its {} is not UTF-8", where, member);
  const std::string_view name = key.name;
  if (role == Role::optimizer && (key.flags & ZR_KEY_PER_GROUP) &&
      (name == "lr_scale" || name == "match" || name == "use"))
    return fmt::format("{}[[optimizer.groups]] has a key of this name; choose another name", where);
  if (std::string problem = unknown_bits_problem(where + "flags", key.flags, ZR_KEY_PER_GROUP); !problem.empty())
    return problem;
  return reserved_problem(where + "rsv", key.rsv);
}

std::string key_problem(const zr_component& component, Role role) {
  if (component.n_keys && !component.keys)
    return fmt::format("it declares {} keys, but its list of keys is null", component.n_keys);
  for (uint32_t i = 0; i < component.n_keys; ++i) {
    const zr_key* key = component.keys[i];
    if (!key || !key->name) return fmt::format("key {} has no name", i);
    if (std::string problem = problem_of(*key, role); !problem.empty()) return problem;
  }
  std::set<std::string> names;
  for (const config::ConfigKey& key :
       config::keys_of(component.keys, component.n_keys, fmt::format("{}.{}", name_of(role), component.id))) {
    std::string problem = declaration_problem(key);
    if (!problem.empty()) return problem;
    if (!names.insert(key.name).second) return fmt::format("the key '{}' is declared twice", key.name);
  }
  return "";
}

constexpr std::size_t kLongestId = 64;

bool is_word(std::string_view text) {
  return !text.empty() && text[0] >= 'a' && text[0] <= 'z' &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos;
}
// "lion" or "acme.lion".
bool is_id(std::string_view id) {
  const std::size_t dot = id.find('.');
  return dot == id.npos ? is_word(id) : is_word(id.substr(0, dot)) && is_word(id.substr(dot + 1));
}

// The vendor's name of an id, or the id if it has none.
std::string first_word(std::string_view id) { return std::string(id.substr(0, id.find('.'))); }

// True if the engine has a key ROLE.WORD, where WORD is the first word of the id, or a tier of this name: then the
// file could not name the component or its table.
bool is_reserved(Role role, std::string_view id) {
  const std::string table(name_of(role)), word = first_word(id);
  const std::vector<config::ConfigKey>& keys = config::host_keys();
  const bool key = std::any_of(keys.begin(), keys.end(),
                               [&](const config::ConfigKey& one) { return one.table == table && one.name == word; });
  return key || word == "use" || (role == Role::optimizer && word == "groups") ||
         (role == Role::communicator && word == "auto") ||
         (role == Role::offload && (word == "device" || word == "auto"));
}

std::string content_problem(const zr_component& component, Role role) {
  if (component.size < ZR_SIZE_0_9(zr_component))
    return too_short("its component", component.size, ZR_SIZE_0_9(zr_component));
  for (const auto& [member, value] : {std::pair{"flags", component.flags}, std::pair{"rsv", component.rsv}})
    if (std::string problem = reserved_problem(member, value); !problem.empty()) return problem;
  if (!component.version || !component.api || !component.create || !component.destroy)
    return "its version, api, create or destroy is null";
  for (const auto& [member, text] :
       {std::pair{"version", component.version}, std::pair{"description", component.description},
        std::pair{"url", component.url}, std::pair{"license", component.license}})
    if (text && find_not_utf8(text) != std::string_view::npos) return fmt::format("its {} is not UTF-8", member);
  std::string problem = api_problem(component, role);
  return problem.empty() ? key_problem(component, role) : problem;
}

// The role with this kind ("zr.strategy/1"), or nothing if this zeroth does not know the kind.
std::optional<Role> role_with_kind(std::string_view kind) {
  for (const Role role : kRoles)
    if (abi_kind_of(role) == kind) return role;
  return std::nullopt;
}

// The components of a module that were checked so far, as "strategy 'ID'".
using ComponentNames = std::set<std::string>;

// Of a component with an id; adds it to `checked`.
std::string component_problem(const zr_component& component, Role role, const Tags& tags, ComponentNames& checked) {
  const std::string component_name = fmt::format("{} '{}'", name_of(role), component.id);
  if (const std::string problem = id_problem(role, component.id); !problem.empty())
    return fmt::format("{}: {}", component_name, problem);
  if (!checked.insert(component_name).second) return fmt::format("it contains {} twice", component_name);
  if (std::find(tags.roles.begin(), tags.roles.end(), role) == tags.roles.end())
    return fmt::format("it contains {}, but exports no tag zr_tag_kind_{}_1; add ZR_TAG", component_name,
                       name_of(role));
  const std::string problem = content_problem(component, role);
  return problem.empty() ? "" : fmt::format("{}: {}", component_name, problem);
}

// Of tags for which the module contains no component.
std::string tag_problem(const Tags& tags, const ComponentNames& components) {
  for (const Role role : tags.roles)
    if (std::none_of(components.begin(), components.end(),
                     [&](const std::string& component_name) { return component_name.rfind(name_of(role), 0) == 0; }))
      return fmt::format("its tag zr_tag_kind_{}_1 announces a {}, but it contains none", name_of(role),
                         abi_kind_of(role));
  for (const auto& [role, id] : tags.ids)
    if (!components.contains(fmt::format("{} '{}'", name_of(role), id)))
      return fmt::format("its tag zr_tag_id_{}_{} announces {} '{}', but it does not contain it", name_of(role), id,
                         name_of(role), id);
  for (const std::string& component : components)
    if (!tags.ids.empty() && std::none_of(tags.ids.begin(), tags.ids.end(), [&](const auto& tag) {
          return component == fmt::format("{} '{}'", name_of(tag.first), tag.second);
        }))
      return fmt::format("it contains {}, but has tags for other ids only; add ZR_ID_TAG", component);
  return "";
}

std::string table_problem(const zr_module& module, const Tags& tags) {
  if (!module.name || !module.vendor || !module.version || !module.build)
    return "its name, vendor, version or build is null";
  for (const auto& [member, text] : {std::pair{"name", module.name}, std::pair{"vendor", module.vendor},
                                     std::pair{"version", module.version}, std::pair{"build", module.build}})
    if (find_not_utf8(text) != std::string_view::npos) return fmt::format("its {} is not UTF-8", member);
  if (std::string problem = reserved_problem("rsv of its module", module.rsv); !problem.empty()) return problem;
  ComponentNames checked;
  for (uint32_t i = 0; i < module.n_components; ++i) {
    const zr_component* component = module.components ? module.components[i] : nullptr;
    if (!component || !component->id || !component->kind) return fmt::format("component {} has no id or no kind", i);
    const std::optional<Role> role = role_with_kind(component->kind);
    if (!role) continue;
    std::string problem = component_problem(*component, *role, tags, checked);
    if (!problem.empty()) return problem;
  }
  return tag_problem(tags, checked);
}

std::string as_plugin_bug(const std::string& problem) {
  return problem.empty() ? "" : problem + ": this is a bug in the plug-in";
}

}  // namespace

std::string id_problem(Role role, std::string_view id) {
  if (id.size() > kLongestId) return fmt::format("an id has at most {} characters; choose a shorter one", kLongestId);
  if (!is_id(id))
    return "an id has lower-case letters, digits and underscores and begins with a letter; a vendor's name of the same "
           "form and a dot may precede it";
  if (is_reserved(role, id))
    return fmt::format("'{}' is a key or a value of [{}] in the TOML file; choose another id", first_word(id),
                       name_of(role));
  return "";
}

std::string module_problem(const zr_module* module, const Tags& tags) {
  if (module->size < ZR_SIZE_0_9(zr_module))
    return as_plugin_bug(too_short("its module", module->size, ZR_SIZE_0_9(zr_module)));
  if (module->need_minor != tags.needed.minor)
    return as_plugin_bug(
        fmt::format("its module needs plug-in ABI {}.{}, but its tag says {}.{}; add ZR_TAG(ZR_ABI_TAG), and "
                    "set need_minor to ZR_TARGET_MINOR",
                    tags.needed.major, module->need_minor, tags.needed.major, tags.needed.minor));
  return as_plugin_bug(table_problem(*module, tags));
}

}  // namespace zr::host::plugin
