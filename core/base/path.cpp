#include "base/path.hpp"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"

namespace zr::host {

namespace fs = std::filesystem;

namespace {

// The home folder of a user, or of this one if `name` is ""; "": it has none.
std::string home_of(const std::string& name) {
  const char* home = name.empty() ? std::getenv("HOME") : nullptr;
  if (home && *home) return home;
  const passwd* user = name.empty() ? ::getpwuid(::geteuid()) : ::getpwnam(name.c_str());
  return user && user->pw_dir ? user->pw_dir : "";
}

// Without "." and, if it has "..", as the kernel would resolve it.
std::string tidy(const fs::path& path) {
  fs::path parts;
  bool up = false;
  for (const fs::path& part : path) {
    up |= part == "..";
    if (part != "." && !(part.empty() && part != *path.begin())) parts /= part;
  }
  std::error_code error;
  const fs::path canonical = up ? fs::weakly_canonical(parts, error) : parts;
  return (error ? parts : canonical).string();
}

}  // namespace

std::string absolute_path(const std::string& text, const std::string& base, std::string& problem) {
  if (!text.starts_with("~")) return tidy(fs::path(base) / text);
  const std::size_t slash = std::min(text.find('/'), text.size());
  const std::string name = text.substr(1, slash - 1), home = home_of(name);
  if (home.empty()) {
    problem = name.empty() ? "the home folder of this user is not known; set HOME, or write an absolute path"
                           : fmt::format(
                                 "there is no user '{}' with a home folder; write an absolute path, or ./{} for "
                                 "a file of that name",
                                 printable(name), printable(text));
    return "";
  }
  return tidy(fs::path(home) / text.substr(std::min(slash + 1, text.size())));
}

std::string with_home(const std::string& text) {
  if (!text.starts_with("~")) return text;
  std::string problem, path = absolute_path(text, "/", problem);
  if (!problem.empty()) fail_user(fmt::format("'{}': {}", printable(text), problem));
  return path;
}

std::string folder_of(const std::string& file) {
  std::error_code error;
  const fs::path path = fs::absolute(file, error);
  return tidy((error ? fs::path(file) : path).parent_path());
}

}  // namespace zr::host
