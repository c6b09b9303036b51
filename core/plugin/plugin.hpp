// Plug-in libraries: found by role and id in absolute directories, judged without running, loaded, never unloaded.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "config/config.hpp"
#include "zr/abi/module.h"

namespace zr::host {

enum class Role { strategy, communicator, optimizer, offload };
std::string_view name_of(Role role);  // "strategy"
std::string_view kind_of(Role role);  // "zr.strategy/1"

/// A loaded component; plain pointers into a library that stays loaded for the life of the process.
struct Component {
  const zr_component* table = nullptr;
  const zr_module* module = nullptr;
  std::filesystem::path file;
  const void* api() const { return table->api; }
};
/// "strategy", from the component's kind.
std::string_view role_of(const Component& component);

/// What was found in one file: id, kinds and ABI from its data tags, or why it is refused.
struct PluginValidation {
  std::filesystem::path file;
  bool accepted = false;
  std::string reason;                 // why not, and the remedy
  std::vector<Component> components;  // if accepted
};

/// From now on this process loads a library only after a child process has done so, so that one which crashes, ends its
/// process or never returns is named and rejected. For a process that has one thread when it loads (`zeroth`).
void probe_before_loading();

/// Why a folder of the search path cannot be searched ("not there", "cannot be read: Permission denied"), or "".
std::string folder_problem(const std::filesystem::path& folder);

/// The search path of this process. Files are named zr_<role>_<id>.so.
class Registry {
 public:
  /// ZR_PLUGIN_PATH (secure_getenv, absolute entries only), then the build tree's or installation's plugins folder.
  static std::vector<std::filesystem::path> standard_directories();
  explicit Registry(const std::vector<std::filesystem::path>& directories = standard_directories());

  /// Loads `id`, or the library at an absolute path. Throws Failure naming file, need and remedy; a missing id lists
  /// the ids there are and the nearest. `where` is where it was named ("gpt.toml:3:12"). [control]
  Component load(Role role, const std::string& id, const std::string& where) const;
  /// The ids of a role for which there is a file, in order, judged by name alone.
  std::vector<std::string> ids(Role role) const;
  /// A file zr_<role>_<id>.so exists in a directory.
  bool exists(Role role, const std::string& id) const;
  /// Every candidate file of the directories, judged and, if sound, loaded. [control]
  std::vector<PluginValidation> list() const;
  /// [control]
  static PluginValidation validate(const std::filesystem::path& file);
  const std::vector<std::filesystem::path>& directories() const { return directories_; }

 private:
  std::vector<std::filesystem::path> files(Role role, const std::string& id) const;
  [[noreturn]] void fail_missing(Role role, const std::string& id, const std::string& where) const;

  std::vector<std::filesystem::path> directories_;
};

}  // namespace zr::host
