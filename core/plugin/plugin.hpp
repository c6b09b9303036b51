// Plug-in libraries: found by role and id in absolute directories, validated before any code runs, never unloaded.
#pragma once

#include <filesystem>
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

/// Why a file is rejected, for code that chooses a remedy. The text of PluginValidation::reason says more.
enum class RejectionCause {
  none,
  bad_path,            // relative, or there is no such file
  foreign_owner,       // subject: the component of the path that belongs to a user who is not trusted
  writable_by_others,  // subjects: the components of the path that other users can write
  broken_link,         // subject: the link
  not_a_file,
  unreadable,  // subject: the file
  not_a_library,
  not_a_plugin,     // no ABI tag
  abi_too_new,      // it needs a newer host
  abi_too_old,      // this host does not load plug-ins of this version any more
  other_drafts,     // it uses draft headers of another version
  unknown_role,     // only roles or revisions that this host does not know
  crashed,          // its code ended the process
  timed_out,        // its code did not return
  missing_library,  // subject: the name of a shared library that the dynamic loader does not find
  noexec,           // subject: the resolved file, on a file system that forbids running code
  unloadable,       // another error of the dynamic loader, such as an undefined symbol
  replaced,         // the file changed while it was being loaded
  plugin_bug,       // its tables break a rule of the ABI
  wrong_role,       // the file is named after another role
  wrong_name,       // subject: the name that the file should have
  duplicate,        // subjects: the files with the same role and id, in the order of the search path
};
/// The cause of a rejection, and the files or names that the remedy is about.
struct Rejection {
  RejectionCause cause = RejectionCause::none;
  std::vector<std::string> subjects{};
};

/// The result of validating one file: its components, or the reason why it is rejected.
struct PluginValidation {
  std::filesystem::path file;
  bool accepted = false;
  std::string reason;                   // if not accepted: the problem and the remedy
  std::vector<Component> components;    // if accepted
  std::string hint{};                   // if it is found by its absolute path only: why, and the remedy
  std::vector<std::string> warnings{};  // if accepted: flags with which it should not be built, and the remedy
  Rejection rejection{};                // if not accepted
};

/// From now on, a child process loads each library before this process does, so that a library that crashes, exits or
/// never returns is rejected by name. Only for processes with one thread when they load (`zeroth`).
void probe_before_loading();

/// The package of Debian 12 with this library ("libmpi.so.40"), or "" if it is not one that plug-ins often link.
std::string debian_package_of(const std::string& library);

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

  /// Loads `id`, or the library at an absolute path. Throws Error with file, problem and remedy; for an unknown id, the
  /// message lists the available ids and the nearest one. `where` is the origin of the id ("gpt.toml:3:12"). [control]
  Component load(Role role, const std::string& id, const std::string& where) const;
  /// The ids of a role, sorted, by the names of files and by tags; no library is loaded.
  std::vector<std::string> ids(Role role) const;
  /// True if a library in a directory has this id, by its name or by a tag.
  bool exists(Role role, const std::string& id) const;
  /// True if a library with this communicator has the tag zr_tag_several_hosts. No library is loaded.
  bool connects_hosts(const std::string& communicator) const;
  /// Validates every candidate file of the directories, and loads the valid ones. [control]
  std::vector<PluginValidation> list() const;
  /// Validates one file, and loads it if it is valid. [control]
  static PluginValidation validate(const std::filesystem::path& file);
  const std::vector<std::filesystem::path>& directories() const { return directories_; }
  /// The plug-ins for the memory of a device, a value of job.device: in the folders of its type ("cuda") below the
  /// directories. None for the CPU.
  Registry of_device(const std::string& device) const;
  /// The types of devices for which a directory has a folder with plug-ins, sorted.
  std::vector<std::string> device_types() const;

 private:
  std::vector<std::filesystem::path> files(Role role, const std::string& id) const;
  PluginValidation validate_single(const std::filesystem::path& file) const;
  PluginValidation validate_collection(const std::filesystem::path& file) const;
  [[noreturn]] void fail_missing(Role role, const std::string& id, const std::string& where) const;

  std::vector<std::filesystem::path> directories_;
};

}  // namespace zr::host::plugin
