// `zeroth new`: writes the project of a plug-in, which builds with the SDK alone and trains at once.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace zr::host::cli {

struct NewProject {
  std::string role, id, folder;
  bool in_c = false;  // in C11 instead of C++17
};

/// Writes the project from the templates of the build tree or the installation to a new or an empty folder; `bin` is
/// the folder of the program. Returns the names of the files, sorted. Throws Error; then it leaves none of its files.
std::vector<std::string> write_project(const NewProject& project, const std::filesystem::path& bin);

}  // namespace zr::host::cli
