// Reads the dynamic symbols of a shared library without running it. Internal to core/plugin. Boost.DLL 1.74's
// library_info cannot: it reads only .symtab, which stripped files do not have, with names from the last string table.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace zr::host::plugin {

/// Names of the symbols exported from `section` of a 64-bit ELF library of this machine, stripped or not; empty if
/// there is no such section. nullopt if it is not such a library, or if its tables exceed the file.
std::optional<std::vector<std::string>> exported_symbols(const std::filesystem::path& file, const std::string& section);

/// A symbol that a library exports.
struct ExportedSymbol {
  std::string name;
  bool unique;  // STB_GNU_UNIQUE: the process has one definition of it, also with RTLD_LOCAL
};
/// All symbols that a 64-bit ELF library of this machine exports, except those that the linker adds; empty if it is no
/// such library.
std::vector<ExportedSymbol> all_exports(const std::filesystem::path& file);

}  // namespace zr::host::plugin
