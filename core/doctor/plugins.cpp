#include "doctor/plugins.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "base/text.hpp"
#include "doctor/disk.hpp"
#include "zr/error.hpp"

namespace zr::host::doctor {

namespace fs = std::filesystem;
using plugin::RejectionCause;

namespace {

// True if another user owns one of the files, or if this user cannot change the folder of the plug-in.
bool changes_need_root(const plugin::PluginValidation& validation) {
  const uid_t user = ::geteuid();
  if (user == 0) return false;
  const auto owned = [&](const std::string& path) {
    struct stat status {};
    return ::lstat(path.c_str(), &status) != 0 || status.st_uid == user;
  };
  const std::vector<std::string>& subjects = validation.rejection.subjects;
  switch (validation.rejection.cause) {
    case RejectionCause::foreign_owner: return true;
    case RejectionCause::writable_by_others:
    case RejectionCause::unreadable: return !std::all_of(subjects.begin(), subjects.end(), owned);
    default: return ::access(validation.file.parent_path().c_str(), W_OK) != 0;
  }
}

std::string disable(const std::string& file) {
  return fmt::format("mv {} {}", shell_word(file), shell_word(file + ".disabled"));
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + shell_word(word);
  return text;
}

std::string library_remedy(const PluginFile& file, const PluginFacts& facts) {
  const std::string& library = file.validation.rejection.subjects.front();
  if (!file.library_folder.empty())
    return fmt::format("export LD_LIBRARY_PATH={}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
                       shell_word(file.library_folder));
  const std::string package = plugin::debian_package_of(library);
  if (!facts.has_apt || package.empty()) return "";
  return as_root("apt-get install " + package, facts.is_root);
}

// The value of ZR_PLUGIN_PATH without a folder.
std::string path_without(const std::string& variable, const std::string& folder) {
  std::istringstream in(variable);
  std::string rest;
  for (std::string entry; std::getline(in, entry, ':');)
    if (!entry.empty() && entry != folder) rest += (rest.empty() ? "" : ":") + entry;
  return rest.empty() ? "unset ZR_PLUGIN_PATH" : "export ZR_PLUGIN_PATH=" + shell_word(rest);
}

void add_folders(Checks& checks, const PluginFacts& facts) {
  for (const PluginFolder& folder : facts.folders) {
    if (folder.exists && folder.readable) continue;
    checks.push_back({"plug-ins", folder.path, Verdict::warning,
                      folder.exists ? "this folder of the search path cannot be read"
                                    : "this folder of the search path does not exist",
                      folder.exists ? as_root("chmod a+rx " + shell_word(folder.path), facts.is_root)
                                    : path_without(facts.variable, folder.path)});
  }
}

void add_accepted(Checks& checks, const plugin::PluginValidation& validation) {
  for (const plugin::Component& component : validation.components) {
    const std::string name = fmt::format("{} '{}'", role_of(component), component.table->id);
    checks.push_back({"plug-ins", name, Verdict::ok,
                      fmt::format("loads; version {}, {}", component.table->version, component.file.string())});
    for (const std::string& warning : validation.warnings)
      checks.push_back({"plug-ins", name, Verdict::warning, warning});
  }
}

// Roles without any plug-in that loads.
void add_missing_roles(Checks& checks, const PluginFacts& facts) {
  for (const plugin::Role role : plugin::kRoles) {
    const bool found = std::any_of(facts.files.begin(), facts.files.end(), [&](const PluginFile& file) {
      const auto& components = file.validation.components;
      return std::any_of(components.begin(), components.end(),
                         [&](const auto& component) { return role_of(component) == name_of(role); });
    });
    if (found) continue;
    const bool needed = role == plugin::Role::strategy || role == plugin::Role::optimizer;
    std::string folders;
    for (const PluginFolder& folder : facts.folders) folders += (folders.empty() ? "" : ", ") + folder.path;
    checks.push_back({"plug-ins", std::string(name_of(role)), needed ? Verdict::problem : Verdict::warning,
                      fmt::format("no {} plug-in loads (searched: {}); {}; add the folder of the installation's "
                                  "plug-ins to ZR_PLUGIN_PATH",
                                  name_of(role), folders.empty() ? "no folder" : folders,
                                  needed                               ? "every job needs one"
                                  : role == plugin::Role::communicator ? "jobs are limited to one rank"
                                                                       : "states cannot be offloaded")});
  }
}

}  // namespace

PluginFacts plugin_facts() {
  PluginFacts facts;
  facts.is_root = ::geteuid() == 0;
  facts.has_apt = ::access("/usr/bin/apt-get", X_OK) == 0;
  if (const char* variable = ::secure_getenv("ZR_PLUGIN_PATH")) facts.variable = variable;
  std::vector<fs::path> directories;
  try {
    directories = plugin::Registry::standard_directories();
  } catch (const Error& error) {
    facts.search_problem = error.what();
    return facts;
  }
  const plugin::Registry registry(directories);
  std::error_code error;
  for (const fs::path& folder : registry.directories())
    facts.folders.push_back({folder.string(), fs::is_directory(folder, error), plugin::folder_problem(folder).empty()});
  for (plugin::PluginValidation& validation : registry.list()) {
    PluginFile file{std::move(validation)};
    file.needs_root = changes_need_root(file.validation);
    const auto& [cause, subjects] = file.validation.rejection;
    if (cause == RejectionCause::noexec) file.mount = file_system_facts(subjects.front()).mount;
    const fs::path folder = file.validation.file.parent_path();
    if (cause == RejectionCause::missing_library && fs::exists(folder / subjects.front(), error))
      file.library_folder = folder.string();
    facts.files.push_back(std::move(file));
  }
  return facts;
}

std::string remedy_of(const PluginFile& file, const PluginFacts& facts) {
  const plugin::Rejection& rejection = file.validation.rejection;
  const std::vector<std::string>& subjects = rejection.subjects;
  const std::string path = file.validation.file.string();
  const auto owner = [&](const std::string& command) { return as_root(command, facts.is_root || !file.needs_root); };
  switch (rejection.cause) {
    case RejectionCause::writable_by_others: return owner("chmod go-w " + joined(subjects));
    case RejectionCause::foreign_owner: return owner("chown -h \"$(id -un)\" " + joined(subjects));
    case RejectionCause::broken_link: return owner("rm " + joined(subjects));
    case RejectionCause::unreadable: return subjects.empty() ? "" : owner("chmod a+r " + joined(subjects));
    case RejectionCause::not_a_file:
    case RejectionCause::not_a_library:
    case RejectionCause::not_a_plugin:
    case RejectionCause::crashed:
    case RejectionCause::timed_out: return owner(disable(path));
    case RejectionCause::missing_library: return library_remedy(file, facts);
    case RejectionCause::noexec: return as_root("mount -o remount,exec " + shell_word(file.mount), facts.is_root);
    case RejectionCause::wrong_name:
      return owner(fmt::format("mv {} {}", shell_word(path),
                               shell_word((file.validation.file.parent_path() / subjects.front()).string())));
    case RejectionCause::duplicate: {
      std::string command;  // the first file of the search path stays
      for (auto other = subjects.begin() + 1; other < subjects.end(); ++other)
        command += (command.empty() ? "" : " && ") + owner(disable(*other));
      return command;
    }
    default: return "";
  }
}

Checks plugin_checks(const PluginFacts& facts, const JobNeeds& needs) {
  if (!facts.search_problem.empty())
    return {{"plug-ins", "search path", Verdict::problem, facts.search_problem, "unset ZR_PLUGIN_PATH"}};
  Checks checks;
  add_folders(checks, facts);
  for (const PluginFile& file : facts.files)
    if (file.validation.accepted) add_accepted(checks, file.validation);
  for (const PluginFile& file : facts.files) {
    if (file.validation.accepted) continue;
    const bool foreign = file.validation.rejection.cause == RejectionCause::foreign_owner;
    // With a file, the line of the file says whether its own plug-ins load.
    checks.push_back({"plug-ins", file.validation.file.string(), needs.given() ? Verdict::warning : Verdict::problem,
                      fmt::format("will not load: {}{}", file.validation.reason,
                                  foreign ? "; or take it over, if you trust its contents" : ""),
                      remedy_of(file, facts)});
  }
  add_missing_roles(checks, facts);
  return checks;
}

}  // namespace zr::host::doctor
