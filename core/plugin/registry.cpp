#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

#include "base/error.hpp"
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
  fail_internal(component.file.string() + ": a component of the unknown kind '" + component.table->kind +
                "' was loaded");
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

std::string file_name(Role role, const std::string& id) {
  return "zr_" + std::string(name_of(role)) + "_" + id + ".so";
}

// Splits zr_strategy_flat.so into "strategy" and "flat".
bool split_name(const fs::path& file, Role& role, std::string& id) {
  const std::string name = file.filename().string();
  for (const Role one : kRoles) {
    const std::string start = "zr_" + std::string(name_of(one)) + "_";
    if (name.rfind(start, 0) != 0 || file.extension() != ".so" || name.size() <= start.size() + 3) continue;
    role = one;
    id = name.substr(start.size(), name.size() - start.size() - 3);
    return true;
  }
  return false;
}

const Component* find(const PluginValidation& validation, Role role, const std::string& id) {
  for (const Component& one : validation.components)
    if (abi_kind_of(role) == one.table->kind && (id.empty() || id == one.table->id)) return &one;
  return nullptr;
}

std::string duplicate_problem(const std::vector<fs::path>& files) {
  std::string text = "several folders contain it: ";
  for (const fs::path& file : files) text += (&file == &files.front() ? "" : " and ") + file.string();
  return text + "; remove all but one, or name the file by its absolute path";
}

// The file that is named after an id must contain that id.
std::string name_problem(const PluginValidation& validation, Role role, const std::string& id) {
  if (find(validation, role, id)) return "";
  const Component* other = find(validation, role, "");
  const std::string held = other ? other->table->id : "";
  return "it contains " + std::string(name_of(role)) + " '" + held + "', not '" + id + "'; rename the file to " +
         file_name(role, held);
}

std::string kind_problem(const Tags& tags, Role role) {
  if (!tags.rejection.empty() || std::find(tags.roles.begin(), tags.roles.end(), role) != tags.roles.end()) return "";
  return "it contains " + with_articles(tags.roles) + ", but " + with_articles({role}) +
         " is needed here; name a plug-in of that kind";
}

std::vector<fs::path> candidates(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  Role role{};
  std::string id;
  for (fs::directory_iterator one(folder, error), end; !error && one != end; one.increment(error))
    if (split_name(one->path(), role, id)) found.push_back(one->path());
  std::sort(found.begin(), found.end());
  return found;
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
  std::vector<fs::path> all;
  if (const char* set = ::secure_getenv("ZR_PLUGIN_PATH")) {
    std::istringstream in(set);
    for (std::string one; std::getline(in, one, ':');) {
      if (one.empty()) continue;
      if (!fs::path(one).is_absolute())
        fail_user("ZR_PLUGIN_PATH: '" + one + "' is a relative path; write an absolute one");
      all.emplace_back(one);
    }
  }
  Dl_info self{};
  std::error_code error;
  if (!::dladdr(reinterpret_cast<const void*>(&split_name), &self) || !self.dli_fname) return all;
  // The program's path may be relative to an earlier working directory; /proc/self/exe is reliable.
  const fs::path program = fs::canonical("/proc/self/exe", error);
  fs::path file = fs::canonical(self.dli_fname, error);
  if (error || file.filename() == program.filename()) file = program;
  const fs::path base = file.parent_path().parent_path();
  if (fs::exists(base / "CMakeCache.txt", error)) all.push_back(base / "plugins");
  for (const fs::path& installed : {base / ZR_LIBDIR / "zeroth/plugins", file.parent_path() / "zeroth/plugins"})
    if (fs::is_directory(installed, error)) all.push_back(installed);
  return all;
}

Registry::Registry(const std::vector<fs::path>& directories) {
  std::error_code error;
  for (const fs::path& one : directories) {
    const auto same = [&](const fs::path& other) { return one == other || fs::equivalent(one, other, error); };
    if (std::none_of(directories_.begin(), directories_.end(), same)) directories_.push_back(one);
  }
}

std::vector<fs::path> Registry::files(Role role, const std::string& id) const {
  std::vector<fs::path> found;
  std::error_code error;
  for (const fs::path& folder : directories_)
    if (fs::exists(fs::symlink_status(folder / file_name(role, id), error)))  // a dangling link has its own error
      found.push_back(folder / file_name(role, id));
  return found;
}

bool Registry::exists(Role role, const std::string& id) const { return !files(role, id).empty(); }

std::vector<std::string> Registry::ids(Role role) const {
  std::set<std::string> all;
  Role of{};
  std::string id;
  for (const fs::path& folder : directories_)
    for (const fs::path& file : candidates(folder))
      if (split_name(file, of, id) && of == role) all.insert(id);
  return {all.begin(), all.end()};
}

void Registry::fail_missing(Role role, const std::string& id, const std::string& where) const {
  const std::vector<std::string> there = ids(role);
  const std::string near = nearest(id, there);
  std::string text = where + ": there is no " + std::string(name_of(role)) + " plug-in '" + id + "'";
  if (!near.empty()) text += "; did you mean '" + near + "'?";
  text += near.empty() ? "; available:" : " Available:";
  for (const auto& one : there) text += (&one == &there.front() ? " " : ", ") + one;
  if (there.empty()) text += " none";
  text += " (looked for " + file_name(role, id) + " in ";
  for (const fs::path& folder : directories_) {
    const std::string problem = folder_problem(folder);
    text += (&folder == &directories_.front() ? "" : ", ") + folder.string();
    if (!problem.empty()) text += " (" + problem + ")";
  }
  fail_user(text + (directories_.empty() ? "no folder" : "") + "; ZR_PLUGIN_PATH adds folders)");
}

Component Registry::load(Role role, const std::string& id, const std::string& where) const {
  const std::string who = where + ": " + std::string(name_of(role)) + " plug-in '" + id + "': ";
  const bool by_path = !id.empty() && id[0] == '/';
  if (!by_path && id.find('/') != id.npos) fail_user(who + "name a plug-in by its id or by an absolute path");
  const std::vector<fs::path> found = by_path ? std::vector{fs::path(id)} : files(role, id);
  std::error_code error;
  if (by_path && !fs::exists(fs::symlink_status(found[0], error)))
    fail_user(who + "there is no such file; correct the path, or name an id");
  if (found.empty()) fail_missing(role, id, where);
  if (found.size() > 1) fail_user(who + duplicate_problem(found));
  const std::string prefix = by_path ? who : who + found[0].string() + ": ";
  const Tags tags = read_tags(found[0]);
  if (const std::string problem = kind_problem(tags, role); !problem.empty()) fail_user(prefix + problem);
  const PluginValidation validation = load_library(found[0], tags);
  if (!validation.accepted) fail_environment(prefix + validation.reason);
  if (!by_path)
    if (const std::string problem = name_problem(validation, role, id); !problem.empty())
      fail_environment(prefix + problem);
  const auto of_role = [&](const Component& one) { return abi_kind_of(role) == one.table->kind; };
  if (by_path && std::count_if(validation.components.begin(), validation.components.end(), of_role) > 1)
    fail_user(prefix +
              "it contains several plug-ins of this role; name one by its id, and add the folder to ZR_PLUGIN_PATH");
  return *find(validation, role, by_path ? "" : id);
}

PluginValidation Registry::validate(const fs::path& file) { return load_library(file, read_tags(file)); }

std::vector<PluginValidation> Registry::list() const {
  std::vector<PluginValidation> all;
  Role role{};
  std::string id;
  for (const fs::path& folder : directories_)
    for (const fs::path& file : candidates(folder)) {
      split_name(file, role, id);
      PluginValidation validation{file, false, "", {}};
      const Tags tags = read_tags(file);
      if (const auto same = files(role, id); same.size() > 1) {
        validation.reason = duplicate_problem(same);
      } else if (validation.reason = kind_problem(tags, role); validation.reason.empty()) {
        validation = load_library(file, tags);
        if (validation.accepted) validation.reason = name_problem(validation, role, id);
      }
      validation.accepted = validation.reason.empty();
      if (!validation.accepted) validation.components.clear();
      all.push_back(std::move(validation));
    }
  return all;
}

}  // namespace zr::host::plugin
