#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>
#include <sstream>
#include <tuple>

#include "base/error.hpp"
#include "config/host_config.hpp"
#include "plugin/library_loader.hpp"

namespace zr::host::plugin {

namespace fs = std::filesystem;

std::string_view name_of(Role role) {
  switch (role) {
    case Role::strategy: return "strategy";
    case Role::communicator: return "communicator";
    case Role::optimizer: return "optimizer";
    default: return "offload";
  }
}

std::string_view abi_kind_of(Role role) {
  switch (role) {
    case Role::strategy: return "zr.strategy/1";
    case Role::communicator: return "zr.communicator/1";
    case Role::optimizer: return "zr.optimizer/1";
    default: return "zr.offload/1";
  }
}

std::string_view role_of(const Component& component) {
  for (const Role role : kRoles)
    if (abi_kind_of(role) == component.table->kind) return name_of(role);
  fail_internal(fmt::format("{}: a component of the unknown kind '{}' was loaded", component.file.string(),
                            component.table->kind));
}

std::string with_articles(const std::vector<Role>& roles) {
  std::string text;
  for (const Role role : roles) {
    const std::string name(name_of(role));
    text += (text.empty() ? "" : " and ") + std::string(name[0] == 'o' ? "an " : "a ") + name;
  }
  return text;
}

namespace {

std::string file_name(Role role, const std::string& id) { return fmt::format("zr_{}_{}.so", name_of(role), id); }

// Splits zr_strategy_flat.so into "strategy" and "flat".
bool split_name(const fs::path& file, Role& role, std::string& id) {
  const std::string name = file.filename().string();
  for (const Role entry : kRoles) {
    const std::string start = fmt::format("zr_{}_", name_of(entry));
    if (name.rfind(start, 0) != 0 || file.extension() != ".so" || name.size() <= start.size() + 3) continue;
    role = entry;
    id = name.substr(start.size(), name.size() - start.size() - 3);
    return true;
  }
  return false;
}

// A library of several components: zr_<name>.so, with a tag per component.
bool is_collection(const fs::path& file) {
  Role role{};
  std::string id;
  return file.filename().string().rfind("zr_", 0) == 0 && file.extension() == ".so" && !split_name(file, role, id);
}

const Component* find(const PluginValidation& validation, Role role, const std::string& id) {
  for (const Component& entry : validation.components)
    if (abi_kind_of(role) == entry.table->kind && (id.empty() || id == entry.table->id)) return &entry;
  return nullptr;
}

std::string duplicate_problem(const std::vector<fs::path>& files, Rejection* rejection = nullptr) {
  if (rejection) *rejection = {RejectionCause::duplicate, {files.begin(), files.end()}};
  std::string text = "several files contain it: ";
  for (const fs::path& file : files) text += (&file == &files.front() ? "" : " and ") + file.string();
  return text + "; remove all but one, or name the file by its absolute path";
}

Role role_with(const Component& component) {
  return *std::find_if(std::begin(kRoles), std::end(kRoles),
                       [&](Role role) { return abi_kind_of(role) == component.table->kind; });
}

// The file that is named after an id must contain that id.
std::string name_problem(const PluginValidation& validation, Role role, const std::string& id) {
  if (find(validation, role, id)) return "";
  const Component* other = find(validation, role, "");
  const std::string other_id = other ? other->table->id : "";
  return fmt::format("it contains {} '{}', not '{}'; rename the file to {}", name_of(role), other_id, id,
                     file_name(role, other_id));
}

std::string kind_problem(const Tags& tags, Role role) {
  if (!tags.rejection.empty() || std::find(tags.roles.begin(), tags.roles.end(), role) != tags.roles.end()) return "";
  return fmt::format("it contains {}, but {} is needed here; name a plug-in of that kind", with_articles(tags.roles),
                     with_articles({role}));
}

// Why a component of a valid library is not found by its id, and the remedy; "" if all are found. has_file: whether
// there is a file with the name of a component, such as a link to this library.
std::string lookup_problem(const PluginValidation& validation, const Tags& tags,
                           const std::function<bool(const Component&)>& has_file, Rejection* rejection = nullptr) {
  constexpr const char* kSeveral =
      "it contains several plug-ins, but is named after one, so that the others are not found; name it zr_<name>.so";
  constexpr const char* kNoTag =
      "it has no tag zr_tag_id_<role>_<id>, so that its components cannot be found; add ZR_ID_TAG, or name it "
      "zr_<role>_<id>.so";
  Role role{};
  std::string id;
  const Component& first = validation.components.front();
  const bool several = validation.components.size() > 1;
  if (split_name(validation.file, role, id)) {
    if (!kind_problem(tags, role).empty())
      return fmt::format("rename the file to {}", file_name(role_with(first), first.table->id));
    if (const std::string problem = name_problem(validation, role, id); !problem.empty()) {
      if (const Component* other = find(validation, role, ""); rejection && other)
        *rejection = {RejectionCause::wrong_name, {file_name(role, other->table->id)}};
      return problem;
    }
    return std::all_of(validation.components.begin(), validation.components.end(), has_file) ? "" : kSeveral;
  }
  if (is_collection(validation.file)) return tags.ids.empty() ? kNoTag : "";
  return fmt::format("rename the file to {}", several ? "zr_<name>.so" : file_name(role_with(first), first.table->id));
}

// The files of a folder that fulfil `condition`, sorted.
std::vector<fs::path> files_in(const fs::path& folder, const std::function<bool(const fs::path&)>& condition) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    if (condition(entry->path())) found.push_back(entry->path());
  std::sort(found.begin(), found.end());
  return found;
}

// The libraries of one component in a folder.
std::vector<fs::path> candidates(const fs::path& folder) {
  return files_in(folder, [](const fs::path& file) {
    Role role{};
    std::string id;
    return split_name(file, role, id);
  });
}

// The ids that the libraries of several components in a folder have, and the libraries.
std::vector<std::tuple<Role, std::string, fs::path>> collected_ids(const fs::path& folder) {
  std::vector<std::tuple<Role, std::string, fs::path>> all;
  for (const fs::path& file : files_in(folder, is_collection))
    for (const auto& [role, id] : read_tags(file).ids) all.emplace_back(role, id, file);
  return all;
}

// Whether a folder of this name may have the plug-ins for a type of device.
bool is_device_type(const std::string& name) {
  return !name.empty() && name != config::kCpuDevice &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == name.npos;
}

}  // namespace

std::string folder_problem(const fs::path& folder) {
  std::error_code error;
  const auto status = fs::status(folder, error);
  if (status.type() == fs::file_type::not_found) return "does not exist";
  if (!error && !fs::is_directory(status)) return "not a folder";
  if (!error) fs::directory_iterator(folder, error);
  return error ? "cannot be read: " + error.message() : "";
}

std::vector<fs::path> Registry::standard_directories() {
  std::vector<fs::path> result;
  if (const char* variable = ::secure_getenv("ZR_PLUGIN_PATH")) {
    std::istringstream in(variable);
    for (std::string entry; std::getline(in, entry, ':');) {
      if (entry.empty()) continue;
      if (!fs::path(entry).is_absolute())
        fail_user(fmt::format("ZR_PLUGIN_PATH: '{}' is a relative path; write an absolute one", entry));
      result.emplace_back(entry);
    }
  }
  Dl_info self{};
  std::error_code error;
  if (!::dladdr(reinterpret_cast<const void*>(&split_name), &self) || !self.dli_fname) return result;
  // The program's path may be relative to an earlier working directory; /proc/self/exe is reliable.
  const fs::path program = fs::canonical("/proc/self/exe", error);
  fs::path file = fs::canonical(self.dli_fname, error);
  if (error || file.filename() == program.filename()) file = program;
  const fs::path base = file.parent_path().parent_path();
  if (fs::exists(base / "CMakeCache.txt", error)) result.push_back(base / "plugins");
  for (const fs::path& installed : {base / ZR_LIBDIR / "zeroth/plugins", file.parent_path() / "zeroth/plugins"})
    if (fs::is_directory(installed, error)) result.push_back(installed);
  return result;
}

Registry::Registry(const std::vector<fs::path>& directories) {
  std::error_code error;
  for (const fs::path& entry : directories) {
    const auto same = [&](const fs::path& other) { return entry == other || fs::equivalent(entry, other, error); };
    if (std::none_of(directories_.begin(), directories_.end(), same)) directories_.push_back(entry);
  }
}

Registry Registry::of_device(const std::string& device) const {
  const std::string type = device.substr(0, device.find(':'));
  std::vector<fs::path> folders;
  std::error_code error;
  for (const fs::path& folder : directories_)
    if (is_device_type(type) && fs::is_directory(folder / type, error)) folders.push_back(folder / type);
  return Registry(folders);
}

std::vector<std::string> Registry::device_types() const {
  std::set<std::string> types;
  std::error_code error;
  for (const fs::path& folder : directories_)
    for (const fs::path& entry : files_in(folder, [&](const fs::path& path) {
           return is_device_type(path.filename().string()) && fs::is_directory(path, error) &&
                  !(candidates(path).empty() && files_in(path, is_collection).empty());
         }))
      types.insert(entry.filename().string());
  return {types.begin(), types.end()};
}

std::vector<fs::path> Registry::files(Role role, const std::string& id) const {
  std::vector<fs::path> found;
  std::error_code error;
  for (const fs::path& folder : directories_)
    if (fs::exists(fs::symlink_status(folder / file_name(role, id), error)))  // a dangling link has its own error
      found.push_back(folder / file_name(role, id));
  for (const fs::path& folder : directories_)
    for (const auto& [file_role, file_id, file] : collected_ids(folder))
      if (file_role == role && file_id == id) found.push_back(file);
  return found;
}

bool Registry::exists(Role role, const std::string& id) const { return !files(role, id).empty(); }

bool Registry::connects_hosts(const std::string& communicator) const {
  const std::vector<fs::path> found = files(Role::communicator, communicator);
  return std::any_of(found.begin(), found.end(), [](const fs::path& file) { return read_tags(file).several_hosts; });
}

std::vector<std::string> Registry::ids(Role role) const {
  std::set<std::string> result;
  Role file_role{};
  std::string id;
  for (const fs::path& folder : directories_)
    for (const fs::path& file : candidates(folder))
      if (split_name(file, file_role, id) && file_role == role) result.insert(id);
  for (const fs::path& folder : directories_)
    for (const auto& [collected_role, collected_id, file] : collected_ids(folder))
      if (collected_role == role) result.insert(collected_id);
  return {result.begin(), result.end()};
}

void Registry::fail_missing(Role role, const std::string& id, const std::string& where) const {
  const std::vector<std::string> available = ids(role);
  const std::string near = nearest(id, available);
  std::string text = fmt::format("{}: there is no {} plug-in '{}'", where, name_of(role), id);
  if (!near.empty()) text += fmt::format("; did you mean '{}'?", near);
  text += near.empty() ? "; available:" : " Available:";
  for (const auto& entry : available) text += (&entry == &available.front() ? " " : ", ") + entry;
  if (available.empty()) text += " none";
  text += fmt::format(" (looked for {} in ", file_name(role, id));
  for (const fs::path& folder : directories_) {
    const std::string problem = folder_problem(folder);
    text += (&folder == &directories_.front() ? "" : ", ") + folder.string();
    if (!problem.empty()) text += fmt::format(" ({})", problem);
  }
  text += fmt::format("{}; ZR_PLUGIN_PATH adds folders)", directories_.empty() ? "no folder" : "");
  for (const fs::path& folder : directories_)
    for (const fs::path& file : files_in(folder, is_collection))
      if (const Tags tags = read_tags(file); !tags.rejection.empty())
        text += fmt::format("\n{} was not searched: {}", file.string(), tags.rejection);
  fail_user(text);
}

Component Registry::load(Role role, const std::string& id, const std::string& where) const {
  const std::string prefix = fmt::format("{}: {} plug-in '{}': ", where, name_of(role), id);
  const bool by_path = !id.empty() && id[0] == '/';
  if (!by_path && id.find('/') != id.npos) fail_user(prefix + "name a plug-in by its id or by an absolute path");
  const std::vector<fs::path> found = by_path ? std::vector{fs::path(id)} : files(role, id);
  std::error_code error;
  if (by_path && !fs::exists(fs::symlink_status(found[0], error)))
    fail_user(prefix + "there is no such file; correct the path, or name an id");
  if (found.empty()) fail_missing(role, id, where);
  if (found.size() > 1) fail_user(prefix + duplicate_problem(found));
  const std::string file_prefix = by_path ? prefix : fmt::format("{}{}: ", prefix, found[0].string());
  const Tags tags = read_tags(found[0]);
  if (const std::string problem = kind_problem(tags, role); !problem.empty()) fail_user(file_prefix + problem);
  const PluginValidation validation = load_library(found[0], tags);
  if (!validation.accepted) fail_environment(file_prefix + validation.reason);
  if (!by_path)
    if (const std::string problem = name_problem(validation, role, id); !problem.empty())
      fail_environment(file_prefix + problem);
  const auto of_role = [&](const Component& entry) { return abi_kind_of(role) == entry.table->kind; };
  if (by_path && std::count_if(validation.components.begin(), validation.components.end(), of_role) > 1)
    fail_user(file_prefix +
              "it contains several plug-ins of this role; name one by its id, and add the folder to ZR_PLUGIN_PATH");
  return *find(validation, role, by_path ? "" : id);
}

PluginValidation Registry::validate(const fs::path& file) {
  const Tags tags = read_tags(file);
  PluginValidation validation = load_library(file, tags);
  validation.warnings = build_warnings(validation);
  if (validation.accepted)
    validation.hint = lookup_problem(validation, tags, [&](const Component& component) {
      std::error_code error;
      return fs::exists(file.parent_path() / file_name(role_with(component), component.table->id), error);
    });
  return validation;
}

// Of a library that is named after one component.
PluginValidation Registry::validate_single(const fs::path& file) const {
  Role role{};
  std::string id;
  split_name(file, role, id);
  PluginValidation validation{file, false, "", {}};
  const Tags tags = read_tags(file);
  if (const auto same = files(role, id); same.size() > 1) {
    validation.reason = duplicate_problem(same, &validation.rejection);
  } else if (validation.reason = kind_problem(tags, role); !validation.reason.empty()) {
    validation.rejection.cause = RejectionCause::wrong_role;
  } else {
    validation = load_library(file, tags);
    Rejection rejection{RejectionCause::plugin_bug};
    if (validation.accepted)
      validation.reason = lookup_problem(
          validation, tags,
          [&](const Component& component) { return !files(role_with(component), component.table->id).empty(); },
          &rejection);
    if (validation.accepted && !validation.reason.empty()) validation.rejection = rejection;
  }
  validation.accepted = validation.reason.empty();
  if (!validation.accepted) validation.components.clear();
  validation.warnings = build_warnings(validation);
  return validation;
}

PluginValidation Registry::validate_collection(const fs::path& file) const {
  const Tags tags = read_tags(file);
  PluginValidation validation = load_library(file, tags);
  std::string problem;
  Rejection rejection{RejectionCause::plugin_bug};
  for (const auto& [role, id] : tags.ids)
    if (const auto same = files(role, id); same.size() > 1 && problem.empty())
      problem = fmt::format("{} '{}': {}", name_of(role), id, duplicate_problem(same, &rejection));
  if (validation.accepted && problem.empty()) problem = lookup_problem(validation, tags, {}, &rejection);
  if (validation.accepted && !problem.empty()) validation = {file, false, problem, {}, "", {}, rejection};
  validation.warnings = build_warnings(validation);
  return validation;
}

std::vector<PluginValidation> Registry::list() const {
  std::vector<PluginValidation> result;
  for (const fs::path& folder : directories_)
    for (const fs::path& file : candidates(folder)) result.push_back(validate_single(file));
  for (const fs::path& folder : directories_)
    for (const fs::path& file : files_in(folder, is_collection)) result.push_back(validate_collection(file));
  return result;
}

}  // namespace zr::host::plugin
