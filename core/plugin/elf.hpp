// Reads the dynamic symbols of a shared library without running it. Internal to core/plugin.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace zr::host::plugin {

/// Names of the symbols exported from `section` of a 64-bit ELF library of this machine, stripped or not; empty if
/// there is no such section. nullopt if it is not such a library, or if its tables exceed the file.
std::optional<std::vector<std::string>> exported_symbols(const std::filesystem::path& file, const std::string& section);

}  // namespace zr::host::plugin
