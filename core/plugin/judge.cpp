#include "plugin/judge.hpp"

#include <sys/stat.h>

#include <boost/dll/shared_library.hpp>
#include <charconv>
#include <cstring>
#include <map>
#include <mutex>

#include "plugin/elf.hpp"

namespace zr::host {

namespace {

constexpr std::string_view kTag = "zr_tag_";

std::string abi_text(unsigned major, unsigned minor) { return std::to_string(major) + "." + std::to_string(minor); }

std::string writable_by_others(const std::filesystem::path& path, const std::string& what) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || !(status.st_mode & (S_IWGRP | S_IWOTH))) return "";
  return what + " can be changed by other users, who could run code as you: chmod go-w " + path.string();
}

// Before anything is read: whose file is it?
std::string access_problem(const std::filesystem::path& file) {
  std::error_code error;
  if (!file.is_absolute()) return "the path is relative: write it in full, from /";
  if (!std::filesystem::exists(file, error)) return "there is no such file";
  if (!std::filesystem::is_regular_file(file, error)) return "it is no file";
  std::string problem = writable_by_others(file, "it");
  if (problem.empty())
    problem = writable_by_others(std::filesystem::canonical(file, error).parent_path(), "its folder");
  return problem;
}

bool parse_abi(std::string_view text, unsigned& major, unsigned& minor) {
  const auto end = text.data() + text.size();
  auto [at, error] = std::from_chars(text.data(), end, major);
  if (error != std::errc() || at == end || *at != '_') return false;
  const auto last = std::from_chars(at + 1, end, minor);
  return last.ec == std::errc() && last.ptr == end;
}

std::string abi_problem(unsigned major, unsigned minor) {
  if (major == ZR_ABI_MAJOR && minor <= ZR_ABI_MINOR) return "";
  const std::string here = abi_text(ZR_ABI_MAJOR, ZR_ABI_MINOR);
  const bool newer = major > ZR_ABI_MAJOR || major == ZR_ABI_MAJOR;
  return "it needs plug-in ABI " + abi_text(major, minor) + ", this zeroth has " + here + ": " +
         (newer ? "install a newer zeroth, or a plug-in built for ABI " : "install a plug-in built for ABI ") + here;
}

// The library objects of this process; never destroyed, so that nothing is ever unloaded.
struct Loaded {
  std::mutex mutex;
  std::map<std::filesystem::path, std::pair<boost::dll::shared_library, const zr_module*>> libraries;
};
Loaded& loaded() {
  static auto* all = new Loaded;
  return *all;
}

const zr_module* enter(boost::dll::shared_library& library, std::string& problem) {
  if (!library.has("zr_module_v1")) {
    problem = "it does not export zr_module_v1: build it with zr_add_plugin() and ZR_MODULE (sdk/include/zr)";
    return nullptr;
  }
  try {
    const zr_module* module = library.get<const zr_module*(uint32_t)>("zr_module_v1")(ZR_ABI_MINOR);
    if (!module) problem = "zr_module_v1 returned no module: its author must return static data";
    return module;
  } catch (const std::exception& error) {
    problem = std::string("zr_module_v1 threw: ") + error.what() + "; its author must return static data";
  } catch (...) {
    problem = "zr_module_v1 threw; its author must return static data";
  }
  return nullptr;
}

}  // namespace

Tags examine(const std::filesystem::path& file) {
  Tags tags;
  tags.refusal = access_problem(file);
  if (!tags.refusal.empty()) return tags;
  const auto symbols = exported_from(file, "zrabi");
  if (!symbols) {
    tags.refusal =
        "it is no shared library for this machine: name one built with zr_add_plugin() (sdk/cmake/ZrPlugin.cmake)";
    return tags;
  }
  unsigned major = 0, minor = 0;
  bool has_abi = false;
  for (std::string_view name : *symbols) {
    if (name.substr(0, kTag.size()) != kTag) continue;
    name.remove_prefix(kTag.size());
    if (name.substr(0, 4) == "abi_" && parse_abi(name.substr(4), major, minor)) has_abi = true;
    for (const Role role : kRoles)
      if (name == "kind_" + std::string(name_of(role))) tags.roles.push_back(role);
  }
  if (!has_abi) {
    tags.refusal =
        "it is no Zeroth plug-in, for it names no ABI: build it with zr_add_plugin() and ZR_MODULE (sdk/include/zr)";
  } else if (tags.refusal = abi_problem(major, minor); tags.refusal.empty() && tags.roles.empty()) {
    tags.refusal =
        "it names no kind that this zeroth knows: strategy, communicator, optimizer or offload; install a newer zeroth";
  }
  return tags;
}

Judgement open_library(const std::filesystem::path& file, const Tags& tags) {
  Judgement judgement{file, false, tags.refusal, {}};
  if (!judgement.reason.empty()) return judgement;
  Loaded& all = loaded();
  const std::lock_guard lock(all.mutex);
  const auto key = std::filesystem::canonical(file);
  auto at = all.libraries.find(key);
  if (at == all.libraries.end()) {
    boost::dll::fs::error_code error;
    boost::dll::shared_library library(file, error,
                                       boost::dll::load_mode::rtld_now | boost::dll::load_mode::rtld_local);
    if (error) {
      const char* said = ::dlerror();
      judgement.reason = "it cannot be loaded: " + std::string(said ? said : error.message().c_str()) +
                         "; install what it needs, or build it for this machine";
      return judgement;
    }
    const zr_module* module = enter(library, judgement.reason);
    at = all.libraries.emplace(key, std::pair(std::move(library), module)).first;
  }
  const zr_module* module = at->second.second;
  if (!module && judgement.reason.empty()) judgement.reason = "it has no module";
  if (judgement.reason.empty()) judgement.reason = module_problem(module, tags);
  if (!judgement.reason.empty()) return judgement;
  judgement.accepted = true;
  for (uint32_t i = 0; i < module->n_components; ++i)
    for (const Role role : kRoles)
      if (kind_of(role) == module->components[i]->kind)
        judgement.components.push_back({module->components[i], module, file});
  return judgement;
}

}  // namespace zr::host
