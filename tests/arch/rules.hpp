// The rules of the tree, each a function of a root folder: what breaks it, as "file:line: what", nothing if it holds.
// Functions of a folder, so that a test can plant a violation in a tree of its own.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace zr::arch {

namespace fs = std::filesystem;
using Found = std::vector<std::string>;

std::vector<std::string> lines_of(const fs::path& file);

/// core/ says a plug-in's folder or id, in code, text or CMake.
Found plugin_names_in_core(const fs::path& root);
/// core/ asks which stage it runs.
Found stages_in_core(const fs::path& root);
/// libtorch's headers or libraries outside core/model, core/api, examples and the tests.
Found libtorch_outside_its_subsystems(const fs::path& root);
/// plugins/ includes a header of core/.
Found host_headers_in_plugins(const fs::path& root);
/// A model of an example that knows Zeroth.
Found zeroth_in_models(const fs::path& root);
/// More than 600 lines; wider than 120 columns.
Found long_files(const fs::path& root);
Found wide_lines(const fs::path& root);
/// A subsystem or a plug-in without a README.md.
Found missing_readmes(const fs::path& root);
/// A public function of the installed headers, or a function of a subsystem's header, that no comment explains.
Found undocumented_functions(const fs::path& root);
/// A function pointer of sdk/include/zr/abi without its thread tag; a header there longer than a screen, 85 lines.
Found untagged_slots(const fs::path& root);
Found long_abi_headers(const fs::path& root);
/// A script of the shell in tests/ or .ci/, by its ending or its first line, that bash cannot parse.
Found broken_scripts(const fs::path& root);
/// A folder at the top level that has no place there.
Found strange_folders(const fs::path& root);

}  // namespace zr::arch
