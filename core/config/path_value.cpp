#include "config/path_value.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "base/path.hpp"
#include "config/value.hpp"

namespace zr::host::config {

namespace {

// The id of a plug-in is not a path.
bool is_path_of_plugin(const std::string& text) { return text.starts_with("~") || text.find('/') != text.npos; }

struct Resolved {
  std::string text, problem;
};

Resolved resolved_parts(const std::string& text, const std::string& base) {
  Resolved all;
  for (std::size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
    end = std::min(text.find(':', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    all.text += begin == 0 ? "" : ":";
    if (!part.empty()) all.text += absolute_path(part, base, all.problem);  // who reads the value reports an empty part
    if (!all.problem.empty()) break;
  }
  return all;
}

Resolved resolved(PathKind kind, const std::string& text, const std::string& base) {
  if (kind == PathKind::list) return resolved_parts(text, base);
  if (kind == PathKind::name_or_path && !is_path_of_plugin(text)) return {text, ""};
  Resolved path;
  path.text = absolute_path(text, base, path.problem);
  // The name of a program that is not there may be one in bin/.
  std::error_code error;
  if (kind == PathKind::program && text.find('/') == text.npos && !std::filesystem::exists(path.text, error))
    path.text = text;
  return path;
}

}  // namespace

std::string resolve_path_value(Entry& entry, const std::string& file_folder) {
  auto* text = std::get_if<std::string>(&entry.value);
  if (entry.key.path_kind == PathKind::none || !text || text->empty()) return "";
  std::error_code error;
  const std::string base =
      entry.origin.from == Origin::From::file ? file_folder : std::filesystem::current_path(error).string();
  Resolved path = resolved(entry.key.path_kind, *text, base);
  if (!path.problem.empty()) return fmt::format("{}: {}", toml_quoted(*text), path.problem);
  entry.given_path = {*text, base};
  *text = std::move(path.text);
  return "";
}

}  // namespace zr::host::config
