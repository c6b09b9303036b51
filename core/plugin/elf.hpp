// Reads the dynamic symbols of a shared library file, without running it. Inside core/plugin.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace zr::host {

/// Names of the symbols exported from `section` of a 64-bit ELF library of this machine, stripped or not; empty if
/// there is no such section. Nothing: it is no such library, or its tables do not fit the file.
std::optional<std::vector<std::string>> exported_symbols(const std::filesystem::path& file, const std::string& section);

}  // namespace zr::host
