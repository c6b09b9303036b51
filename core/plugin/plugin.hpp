// Plug-in libraries: found by role and id in absolute directories, validated before any code runs, never unloaded.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.hpp"
#include "zr/abi/module.h"

namespace zr::host::plugin {

enum class Role { strategy, communicator, optimizer, offload };
std::string_view name_of(Role role);      // "strategy"
std::string_view abi_kind_of(Role role);  // "zr.strategy/1"
inline constexpr Role kRoles[] = {Role::strategy, Role::communicator, Role::optimizer, Role::offload};

/// Why a component of this role cannot have this id, and the remedy; "" if it can.
std::string id_problem(Role role, std::string_view id);

/// A loaded component; plain pointers into a library that stays loaded for the life of the process.
struct Component {
  const zr_component* table = nullptr;
  const zr_module* module = nullptr;
  std::filesystem::path file;
  bool drafts = false;  // the library uses draft headers of the ABI
  const void* api() const { return table->api; }
};
/// "strategy", from the component's kind.
std::string_view role_of(const Component& component);

/// The result of validating one file: its components, or the reason why it is rejected.
struct PluginValidation {
  std::filesystem::path file;
  bool accepted = false;
  std::string reason;                   // if not accepted: the problem and the remedy
  std::vector<Component> components;    // if accepted
  std::string hint{};                   // if it is found by its absolute path only: why, and the remedy
  std::vector<std::string> warnings{};  // if accepted: flags with which it should not be built, and the remedy
};

/// From now on, a child process loads each library before this process does, so that a library that crashes, exits or
/// never returns is rejected by name. Only for processes with one thread when they load (`zeroth`).
void probe_before_loading();

/// Why a folder of the search path cannot be searched ("does not exist", "cannot be read: Permission denied"), or "".
std::string folder_problem(const std::filesystem::path& folder);

/// XXH3 (64 bits) of the component's file, computed when the library was loaded: a later change or removal of the file
/// does not affect it. Throws InternalError if this process did not load the library. Any thread.
uint64_t loaded_file_hash(const Component& component);

/// The search path of this process. A library with one component is named zr_<role>_<id>.so. One with several has any
/// name zr_<name>.so, and a tag for each id (ZR_ID_TAG).
class Registry {
 public:
  /// ZR_PLUGIN_PATH (secure_getenv, absolute entries only), then the build tree's or installation's plugins folder.
  static std::vector<std::filesystem::path> standard_directories();
  explicit Registry(const std::vector<std::filesystem::path>& directories = standard_directories());

  /// Loads `id`, or the library at an absolute path. Throws Error with file, problem and remedy; for an unknown id,
  /// the message lists the available ids and the nearest one. `where` is the origin of the id ("gpt.toml:3:12").
  /// [control]
  Component load(Role role, const std::string& id, const std::string& where) const;
  /// The ids of a role, sorted, by the names of files and by tags; no library is loaded.
  std::vector<std::string> ids(Role role) const;
  /// True if a library in a directory has this id, by its name or by a tag.
  bool exists(Role role, const std::string& id) const;
  /// Validates every candidate file of the directories, and loads the valid ones. [control]
  std::vector<PluginValidation> list() const;
  /// Validates one file, and loads it if it is valid. [control]
  static PluginValidation validate(const std::filesystem::path& file);
  const std::vector<std::filesystem::path>& directories() const { return directories_; }

 private:
  std::vector<std::filesystem::path> files(Role role, const std::string& id) const;
  PluginValidation validate_single(const std::filesystem::path& file) const;
  PluginValidation validate_collection(const std::filesystem::path& file) const;
  [[noreturn]] void fail_missing(Role role, const std::string& id, const std::string& where) const;

  std::vector<std::filesystem::path> directories_;
};

}  // namespace zr::host::plugin
