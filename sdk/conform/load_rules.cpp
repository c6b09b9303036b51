// ZR-L..: the file, its symbols, and its tables.
#include <gnu/libc-version.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <string>

#include "conform/elf_image.hpp"
#include "conform/library.hpp"
#include "conform/rule.hpp"

namespace zr::conform {

namespace {

void file_is_a_library(Case& test) {
  const ElfImage image = read_elf(test.file());
  require(image.problem.empty(), image.problem);
  struct stat status {};
  if (::stat(test.file().c_str(), &status) == 0 && (status.st_mode & S_IWOTH)) fail("every user can write to it");
}

bool is_tag(const std::string& name) { return name.rfind("zr_tag_", 0) == 0; }

void exports_only_the_entry(Case& test) {
  std::string others;
  bool entry = false;
  for (const ElfSymbol& symbol : read_elf(test.file()).symbols) {
    if (!symbol.defined || symbol.unique || is_tag(symbol.name)) continue;
    if (symbol.name == "zr_module_v1")
      entry = true;
    else if (others.size() < 200)
      others += (others.empty() ? "" : ", ") + symbol.name;
  }
  require(entry, "it does not export zr_module_v1");
  require(others.empty(), "it also exports ", others, "; link it with the version script zr.map");
}

void no_unique_symbols(Case& test) {
  for (const ElfSymbol& symbol : read_elf(test.file()).symbols)
    if (symbol.defined && symbol.unique)
      fail("it exports ", symbol.name, " as STB_GNU_UNIQUE; compile it with -fno-gnu-unique");
}

void no_text_relocations(Case& test) {
  const ElfImage image = read_elf(test.file());
  require(!image.text_relocations, "it has text relocations; compile it with -fPIC");
  require(!image.executable_stack, "it needs an executable stack; link it with -z noexecstack");
}

void needs_no_foreign_runtime(Case& test) {
  static constexpr std::array<const char*, 4> kForeign{"libtorch", "libc10", "libc++", "libzeroth"};
  for (const std::string& library : read_elf(test.file()).needed)
    for (const char* foreign : kForeign)
      if (library.rfind(foreign, 0) == 0) fail("it needs ", library);
}

void needs_no_newer_glibc(Case& test) {
  constexpr int kSupported = 36;  // of 2.x: that of Debian 12, which the engine's own programs need
  int own_major = 0, own_minor = 0;
  std::sscanf(::gnu_get_libc_version(), "%d.%d", &own_major, &own_minor);
  const int newest = own_major == 2 ? std::max(kSupported, own_minor) : kSupported;
  for (const std::string& version : read_elf(test.file()).versions) {
    int major = 0, minor = 0;
    if (std::sscanf(version.c_str(), "GLIBC_%d.%d", &major, &minor) == 2 && (major > 2 || minor > newest))
      fail("it needs ", version, "; build it on a system with glibc 2.", newest, " or older");
  }
}

void loads(Case& test) { test.library(); }

// The names of the tags that a module of these components has.
std::set<std::string> expected_tags(const zr_module& module, const std::string& file_name) {
  std::set<std::string> tags{concat("zr_tag_abi_0_", module.need_minor)};
  for (uint32_t i = 0; i < module.n_components; ++i) {
    const zr_component& one = *module.components[i];
    const std::string role = role_of_kind(one.kind);
    tags.insert(concat("zr_tag_kind_", role, "_1"));
    if (file_name != concat("zr_", role, "_", one.id, ".so")) tags.insert(concat("zr_tag_id_", role, "_", one.id));
  }
  return tags;
}

void tags_match(Case& test) {
  const zr_module& module = *test.library().module();
  std::set<std::string> exported;
  for (const ElfSymbol& symbol : read_elf(test.file()).symbols)
    if (symbol.defined && is_tag(symbol.name)) exported.insert(symbol.name);
  for (const std::string& tag : expected_tags(module, test.file().filename().string()))
    require(exported.count(tag), "the tag ", tag, " is missing");
  const std::set<std::string> all = expected_tags(module, "");
  for (const std::string& tag : exported)  // others, such as zr_tag_draft_0_9, say nothing about the module
    for (const char* prefix : {"zr_tag_abi_", "zr_tag_kind_", "zr_tag_id_"})
      require(tag.rfind(prefix, 0) != 0 || all.count(tag), "the tag ", tag, " does not match the module");
}

void entry_is_pure(Case& test) {
  const Library& library = test.library();
  const zr_module* const module = library.module();
  const zr_module before = *module;
  for (const uint32_t minor : {0u, ZR_ABI_MINOR, ZR_ABI_MINOR + 1, 0xffffffffu, ZR_ABI_MINOR})
    require(library.module(minor) == module && std::memcmp(&before, module, ZR_SIZE_0_9(zr_module)) == 0,
            "zr_module_v1(", minor, ") returned another module, or changed it");
}

bool is_word(std::string_view text) {
  return !text.empty() && text[0] >= 'a' && text[0] <= 'z' &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == text.npos;
}
bool is_id(std::string_view id) {
  const std::size_t dot = id.find('.');
  if (id.size() > 64) return false;
  return dot == id.npos ? is_word(id) : is_word(id.substr(0, dot)) && is_word(id.substr(dot + 1));
}

// A function table of a role: which of its functions may be NULL, by index.
struct TableFunctions {
  const char* role;
  std::size_t count;
  std::set<std::size_t> optional;
};
const TableFunctions& functions_of(const std::string& role) {
  static const auto& all = *new std::array<TableFunctions, 4>{
      // never destroyed
      TableFunctions{"strategy", 10, {8, 9}}, TableFunctions{"communicator", 8, {4, 5, 6}},
      TableFunctions{"optimizer", 3, {}}, TableFunctions{"offload", 10, {6, 7, 8, 9}}};
  return *std::find_if(all.begin(), all.end(), [&](const TableFunctions& one) { return role == one.role; });
}

std::string api_problem(const zr_component& component, const std::string& role) {
  struct Head {
    uint32_t size, rsv;
  } head;
  std::memcpy(&head, component.api, sizeof head);
  if (head.size < api_size_of(role)) return concat("its api table has ", head.size, " bytes, fewer than in ABI 0.9");
  if (head.rsv != 0) return "rsv of its api table is not 0";
  const TableFunctions& table = functions_of(role);
  std::vector<uintptr_t> functions(table.count);
  std::memcpy(functions.data(), static_cast<const char*>(component.api) + sizeof head,
              table.count * sizeof functions[0]);
  for (std::size_t i = 0; i < table.count; ++i)
    if (!functions[i] && !table.optional.count(i)) return concat("function ", i, " of its api table is NULL");
  for (const auto& [one, other] : {std::pair<std::size_t, std::size_t>{8, 9}, {5, 6}, {6, 7}})
    if (table.optional.count(one) && table.optional.count(other) && !functions[one] != !functions[other])
      return concat("function ", one, " of its api table is NULL, but function ", other, " is not");
  return "";
}

std::string component_problem(const zr_component& component) {
  if (component.size < ZR_SIZE_0_9(zr_component))
    return concat("it has ", component.size, " bytes, fewer than in ABI 0.9");
  if (!component.id || !is_id(component.id)) return "its id is not lower-case words";
  const std::string role = role_of_kind(component.kind);
  if (role.empty()) return concat("its kind is ", component.kind ? component.kind : "NULL");
  if (component.flags != 0 || component.rsv != 0) return "flags or rsv is not 0";
  if (!component.version || !component.api || !component.create || !component.destroy)
    return "its version, api, create or destroy is NULL";
  if (component.n_keys > 0 && !component.keys) return "its list of keys is NULL";
  return api_problem(component, role);
}

void tables_are_valid(Case& test) {
  const zr_module& module = *test.library().module();
  require(module.size >= ZR_SIZE_0_9(zr_module), "the module has ", module.size, " bytes, fewer than in ABI 0.9");
  require(module.rsv == 0, "rsv of the module is not 0");
  require(module.name && module.vendor && module.version && module.build, "a text of the module is NULL");
  require(module.need_minor <= module.built_minor && module.built_minor <= ZR_ABI_MINOR, "the module needs ABI 0.",
          module.need_minor, " and was built with 0.", module.built_minor);
  require(module.n_components > 0 && module.components, "the module has no components");
  std::set<std::string> names;
  for (uint32_t i = 0; i < module.n_components; ++i) {
    require(module.components[i], "component ", i, " is NULL");
    const std::string problem = component_problem(*module.components[i]);
    require(problem.empty(), "component ", i, ": ", problem);
    require(names.insert(concat(module.components[i]->kind, " ", module.components[i]->id)).second,
            "two components are ", module.components[i]->id);
  }
}

void keys_are_valid(Case& test) {
  const zr_component& component = test.library().component(test.role(), test.id());
  std::set<std::string> names;
  for (uint32_t i = 0; i < component.n_keys; ++i) {
    const zr_key* key = component.keys[i];
    require(key, "key ", i, " is NULL");
    const std::string problem = problem_of(*key);
    require(problem.empty(), "key ", i, " ('", key->name ? key->name : "", "'): ", problem);
    require(is_word(key->name), "the key '", key->name, "' is not a lower-case word");
    require(names.insert(key->name).second, "the key '", key->name, "' is declared twice");
    require(test.role() == "optimizer" || !(key->flags & ZR_KEY_PER_GROUP), "the key '", key->name,
            "' is per group, but only optimizers have groups");
  }
}

constexpr Rule kRules[] = {
    {"ZR-L01", "", "The file is a shared library for this machine that not every user can write.", file_is_a_library,
     Level::file, true, false},
    {"ZR-L02", "", "The library exports zr_module_v1 and its tags, and nothing else.", exports_only_the_entry,
     Level::file, false, false},
    {"ZR-L03", "", "The library has no symbol of binding STB_GNU_UNIQUE.", no_unique_symbols, Level::file, false,
     false},
    {"ZR-L04", "", "The library has no text relocations and needs no executable stack.", no_text_relocations,
     Level::file, false, false},
    {"ZR-L05", "", "The library needs neither libtorch nor libc++ nor the engine.", needs_no_foreign_runtime,
     Level::file, false, false},
    {"ZR-L18", "", "The library needs no version of glibc newer than 2.36 or, if it is newer, that of this machine.",
     needs_no_newer_glibc, Level::file, false, false},
    {"ZR-L06", "", "The library loads with RTLD_NOW and RTLD_LOCAL, within the time limit.", loads, Level::load, true,
     false},
    {"ZR-L07", "", "zr_module_v1() is pure: it returns the same module for every minor version of a host.",
     entry_is_pure, Level::module, false, false},
    {"ZR-L08", "", "The module, its components and their tables have valid sizes, texts, ids, kinds and functions.",
     tables_are_valid, Level::module, true, false},
    {"ZR-L09", "", "The tags name the ABI version, the roles and the ids of the module.", tags_match, Level::create,
     false, false},
    {"ZR-L10", "", "Every key has a type, a range that contains its default, and a meaning.", keys_are_valid,
     Level::create, false, true},
};

}  // namespace

std::span<const Rule> load_rules() { return kRules; }

}  // namespace zr::conform
