#include "cli/new_command.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "plugin/plugin.hpp"

namespace zr::host::cli {

namespace fs = std::filesystem;

namespace {

// The text of each placeholder: "@ID@".
using Placeholders = std::map<std::string, std::string>;

plugin::Role role_named(const std::string& name) {
  for (const plugin::Role role : plugin::kRoles)
    if (plugin::name_of(role) == name) return role;
  std::vector<std::string> names;
  for (const plugin::Role role : plugin::kRoles) names.emplace_back(plugin::name_of(role));
  const std::string near = nearest(name, names);
  fail_user(fmt::format("zeroth new: unknown role '{}'{} {}", printable(name),
                        near.empty() ? "; the roles are" : fmt::format("; did you mean '{}'? The roles are", near),
                        fmt::join(names, ", ")));
}

// The build tree or the installation that contains the program.
struct Home {
  fs::path root;
  bool is_build_tree;
};
Home home_of(const fs::path& bin) {
  return {bin.parent_path(), path_exists((bin.parent_path() / "CMakeCache.txt").string())};
}

// What comes before the commands that build the plug-in.
void add_steps(Placeholders& texts, const Home& home, const fs::path& bin) {
  const std::string root = shell_word(home.root.string());
  texts["@PREFIX@"] = home.is_build_tree ? "\"$PWD/sdk\"" : root;
  texts["@SDK_STEP@"] =
      home.is_build_tree ? fmt::format("    cmake --install {} --component sdk --prefix sdk\n", root) : "";
  const bool has_model = path_exists((bin / "quickstart").string());
  texts["@PROGRAM@"] = has_model ? "quickstart" : "model/quickstart";
  texts["@MODEL_STEP@"] =
      has_model
          ? ""
          : fmt::format("    cmake -S {}/" ZR_DATADIR
                        "/zeroth/examples/quickstart -B model -DCMAKE_PREFIX_PATH={} -DTORCH_ROOT=/path/to/libtorch\n"
                        "    cmake --build model\n",
                        root, root);
}

Placeholders placeholders_of(const NewProject& project, const fs::path& bin) {
  const std::string language = project.in_c ? "C" : "CXX", source = project.in_c ? "plugin.c" : "plugin.cpp";
  const auto dot = project.id.find('.');
  Placeholders texts{{"@ID@", project.id},
                     {"@ROLE@", project.role},
                     {"@VENDOR@", dot == std::string::npos ? "local" : project.id.substr(0, dot)},
                     {"@LANGUAGE@", language},
                     {"@SOURCE@", source}};
  add_steps(texts, home_of(bin), bin);
  return texts;
}

std::string filled(std::string text, const Placeholders& placeholders) {
  for (const auto& [name, value] : placeholders)
    for (auto at = text.find(name); at != text.npos; at = text.find(name, at + value.size()))
      text.replace(at, name.size(), value);
  return text;
}

// The folder must be new or empty. Returns true if it is new.
bool check_folder(const std::string& folder) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(folder, error);
  if (status.type() == fs::file_type::not_found) return true;
  const std::string name = printable(folder);
  if (!fs::is_directory(folder, error))
    fail_user(fmt::format("zeroth new: '{}' exists and is not a folder; name a new folder", name));
  const bool empty = fs::is_empty(folder, error);
  if (error)
    fail_environment(fmt::format("zeroth new: cannot read the folder '{}': {}; name a folder that you can write to",
                                 name, error.message()));
  if (!empty)
    fail_user(fmt::format(
        "zeroth new: the folder '{}' is not empty, and no file in it is replaced; name a new or an empty folder",
        name));
  return false;
}

fs::path templates_of(const fs::path& bin) {
  const fs::path folder = home_of(bin).root / ZR_DATADIR / "zeroth/template";
  if (!path_exists(folder.string()))
    fail_environment(fmt::format(
        "zeroth new: there are no templates in {}; install the SDK there: cmake --install BUILD --component sdk "
        "--prefix {}",
        folder.string(), shell_word(home_of(bin).root.string())));
  return folder;
}

// Writes the files, and removes them again if one of them cannot be written.
void write_files(const std::string& folder, bool is_new, const std::map<std::string, std::string>& files) {
  std::vector<fs::path> written;
  try {
    if (is_new) make_folder(folder);
    for (const auto& [name, text] : files) {
      const fs::path path = fs::path(folder) / name;
      File file(path.string(), File::Mode::create);
      written.push_back(path);
      file.write(0, text.data(), std::ssize(text));
    }
  } catch (const Error& failure) {
    std::error_code ignored;
    for (const fs::path& path : written) fs::remove(path, ignored);
    if (is_new) fs::remove(folder, ignored);
    fail_like(failure, fmt::format("zeroth new: {}", failure.what()));
  }
}

}  // namespace

std::vector<std::string> write_project(const NewProject& project, const fs::path& bin) {
  const plugin::Role role = role_named(project.role);
  if (const std::string problem = plugin::id_problem(role, project.id); !problem.empty())
    fail_user(fmt::format("zeroth new: id '{}': {}", printable(project.id), problem));
  if (plugin::Registry().exists(role, project.id))
    fail_user(fmt::format(
        "zeroth new: there is already a plug-in {} '{}' (zeroth plugins lists it); choose another id, such as one with "
        "your name before it: acme.{}",
        project.role, project.id, project.id.substr(project.id.find('.') + 1)));
  if (project.folder.empty()) fail_user("zeroth new: the name of the folder is empty; name a new or an empty folder");
  const bool is_new = check_folder(project.folder);
  const fs::path templates = templates_of(bin), of_role = templates / project.role;
  const Placeholders placeholders = placeholders_of(project, bin);
  const std::string source = placeholders.at("@SOURCE@");
  const std::map<std::string, fs::path> sources{{".gitignore", templates / "gitignore"},
                                                {"CMakeLists.txt", templates / "CMakeLists.txt"},
                                                {"README.md", of_role / "README.md"},
                                                {"job.toml", of_role / "job.toml"},
                                                {source, of_role / (project.in_c ? "c" : "cpp") / source}};
  std::map<std::string, std::string> files;
  for (const auto& [name, path] : sources) files[name] = filled(read_file(path.string()), placeholders);
  write_files(project.folder, is_new, files);
  std::vector<std::string> names;
  for (const auto& [name, text] : files) names.push_back(name);
  return names;
}

}  // namespace zr::host::cli
