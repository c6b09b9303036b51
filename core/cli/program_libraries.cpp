#include "cli/program_libraries.hpp"

#include <elf.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "base/log.hpp"
#include "cli/bounded_run.hpp"

extern char** environ;

namespace zr::host::cli {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSearchPath = "LD_LIBRARY_PATH";
constexpr std::size_t kMaxListingBytes = 16u << 20;
constexpr double kListingSeconds = 60;

// The path of the dynamic loader in a 64-bit ELF program, or "".
std::string loader_of(const std::string& program) {
  std::ifstream in(program, std::ios::binary);
  Elf64_Ehdr head{};
  if (!in.read(reinterpret_cast<char*>(&head), sizeof head) || std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 ||
      head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_phentsize != sizeof(Elf64_Phdr))
    return "";
  for (int i = 0; i < head.e_phnum; ++i) {
    Elf64_Phdr part{};
    in.seekg(static_cast<std::streamoff>(head.e_phoff + sizeof part * static_cast<std::size_t>(i)));
    if (!in.read(reinterpret_cast<char*>(&part), sizeof part)) return "";
    if (part.p_type != PT_INTERP || part.p_filesz < 2 || part.p_filesz > 4096) continue;
    std::string loader(part.p_filesz - 1, '\0');  // without the final NUL
    in.seekg(static_cast<std::streamoff>(part.p_offset));
    if (!in.read(loader.data(), static_cast<std::streamsize>(loader.size()))) return "";
    return loader;
  }
  return "";
}

// Whether the path is a dynamic loader of this system. A program may name any file as its loader, and it would be run.
bool is_loader(const fs::path& path) {
  if (!path.filename().string().starts_with("ld-")) return false;
  for (const char* folder : {"/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/"})
    if (path.string().starts_with(folder)) return true;
  return false;
}

// The folder lib/ of the installation or build that this `zeroth` belongs to.
fs::path installed_libraries() {
  std::error_code error;
  const fs::path self = fs::canonical("/proc/self/exe", error);
  return error ? fs::path() : self.parent_path().parent_path() / "lib";
}

}  // namespace

std::vector<LinkedLibrary> linked_libraries(const std::string& file) {
  ProcessOptions options;
  std::error_code error;
  // A shared library names no loader; the one of this program loads it.
  const bool is_library = fs::path(file).filename().string().find(".so") != std::string::npos;
  const fs::path loader = fs::canonical(loader_of(is_library ? "/proc/self/exe" : file).c_str(), error);
  if (error || !is_loader(loader)) return {};
  options.file = loader.string();
  options.arguments = {options.file, file};
  options.environment.emplace_back("LD_TRACE_LOADED_OBJECTS=1");  // the loader only lists libraries
  for (char** variable = environ; *variable; ++variable) options.environment.emplace_back(*variable);
  options.one_pipe = true;
  std::vector<LinkedLibrary> libraries;
  BoundedRun listing(options, kMaxListingBytes);
  if (listing.wait(kListingSeconds, fmt::format("{} to list the libraries of {}", options.file, file)) !=
      BoundedRun::End::completed) {
    log(ZR_LOG_WARN, fmt::format("{} has not listed the libraries of {} within {} s, so they are not checked",
                                 options.file, file, kListingSeconds));
    return {};
  }
  std::istringstream lines(listing.out());
  constexpr std::string_view kArrow = " => ";
  for (std::string line; std::getline(lines, line);) {  // "\tlibx.so.1 => not found", "\tliby.so => /lib/liby.so (0x1)"
    const auto end = line.find(kArrow);
    const auto begin = line.find_first_not_of(" \t");
    if (end == line.npos || begin >= end) continue;
    const std::string name = line.substr(begin, end - begin), found = line.substr(end + kArrow.size());
    const auto same = [&](const LinkedLibrary& library) { return library.name == name; };
    if (std::none_of(libraries.begin(), libraries.end(), same))
      libraries.push_back({name, found.starts_with('/') ? found.substr(0, found.rfind(" (")) : ""});
  }
  return libraries;
}

std::vector<std::string> missing_libraries(const std::string& program) {
  std::vector<std::string> missing;
  for (const LinkedLibrary& library : linked_libraries(program))
    if (library.path.empty()) missing.push_back(library.name);
  return missing;
}

void provide_libraries(const std::string& program) {
  std::vector<std::string> missing = missing_libraries(program);
  const fs::path library_folder = installed_libraries();
  std::string added;  // folders of this installation that have some of the missing libraries
  for (const fs::path& folder : {library_folder, library_folder / "libtorch" / "lib"})
    if (std::any_of(missing.begin(), missing.end(), [&](const auto& name) { return fs::exists(folder / name); }))
      added += (added.empty() ? "" : ":") + folder.string();
  if (!added.empty()) {
    const char* before = std::getenv(kSearchPath);
    ::setenv(kSearchPath, ((before && *before ? fmt::format("{}:", before) : "") + added).c_str(), 1);
    log(ZR_LOG_INFO, fmt::format("{} was linked to {} in another folder; using the one in {}", program,
                                 fmt::join(missing, ", "), added));
    missing = missing_libraries(program);
  }
  if (missing.empty()) return;
  const bool torch = std::find(missing.begin(), missing.end(), "libtorch_cpu.so") != missing.end();
  fail_environment(fmt::format(
      "shared libraries of the program {} were not found: {}; add their folder to LD_LIBRARY_PATH, or link the program "
      "again{}",
      program, fmt::join(missing, ", "),
      torch ? "; libtorch can also be beside libzeroth.so: put it, or a link to it, at " +
                  (library_folder / "libtorch").string()
            : ""));
}

}  // namespace zr::host::cli
