// The rules of the source tree. Each is a function of the root folder and returns the violations as "file:line: text".
// The folder is a parameter so that a test can create a tree with violations.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace zr::arch {

namespace fs = std::filesystem;
using Found = std::vector<std::string>;

std::vector<std::string> lines_of(const fs::path& file);

/// core/ contains a plug-in's folder or id, in code, text or CMake.
Found plugin_names_in_core(const fs::path& root);
/// core/ tests which ZeRO stage runs.
Found stages_in_core(const fs::path& root);
/// The library ends the process of the program that links it. Exempt: the command line, a
/// program; the child process in core/plugin/probe.cpp; zr::guarded, which is compiled into the program.
Found process_exits(const fs::path& root);
/// A static or thread_local variable of a function, or a static data member, in core/, plugins/ or the SDK, whose type
/// may have a destructor: engines, plug-ins and tensors may be destroyed later. It is written as a reference to, or a
/// pointer to, an object that is never destroyed, `static auto* all = new All;`, or its line ends with a comment that
/// says when it is destroyed, `// destroyed: ...`.
Found destroyed_statics(const fs::path& root);
/// libtorch's headers or libraries outside core/model, core/api, examples and the tests.
Found libtorch_outside_its_subsystems(const fs::path& root);
/// plugins/ includes a header of core/. (The compiler finds no such header; a relative path would escape it.)
Found host_headers_in_plugins(const fs::path& root);
/// sdk/conform includes more than the SDK and nlohmann_json: zeroth-conform must run where only the SDK is.
Found more_than_the_sdk_in_conform(const fs::path& root);
/// core/ includes a header of sdk/conform, but for `zeroth conform`, and the step without tensors in core/job.
Found conform_in_core(const fs::path& root);
/// A file outside core/config includes its internal headers, or reads a key of the configuration by its path.
Found configuration_read_by_path(const fs::path& root);
/// core/ names a vendor of devices, apart from comments, core/doctor, and a list of files.
Found vendors_in_core(const fs::path& root);
/// An example's model file uses Zeroth.
Found zeroth_in_models(const fs::path& root);
/// More than 600 lines; wider than 120 columns. (clang-format neither breaks text and comments nor reads CMake files.)
Found long_files(const fs::path& root);
Found wide_lines(const fs::path& root);
/// A subsystem or a plug-in without a README.md.
Found missing_readmes(const fs::path& root);
/// A public function of the installed headers, or a function of a subsystem's header, that no comment explains.
/// (Doxygen reads the installed headers only.)
Found undocumented_functions(const fs::path& root);
/// A function pointer in sdk/include/zr/abi has no thread tag.
Found untagged_slots(const fs::path& root);
/// bash cannot parse a shell script of tests/ or .ci/ (recognized by its extension or first line).
Found broken_scripts(const fs::path& root);
/// A header of core/ that clang-tidy ignores in `make lint`: HeaderFilterRegex of .clang-tidy does not match the path
/// by which the sources include it, which for a subsystem is below build/lint/include.
Found unlinted_headers(const fs::path& root);
/// An unexpected folder at the top level.
Found strange_folders(const fs::path& root);

}  // namespace zr::arch
