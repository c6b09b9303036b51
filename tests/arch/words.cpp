#include "arch/words.hpp"

#include <algorithm>
#include <regex>
#include <set>

#include "arch/rules.hpp"

namespace zr::arch {

namespace {

// The alternatives of a pattern for one of the two kinds of words; "" if there are none.
std::string pattern_of(const std::vector<std::string>& lines, bool exact) {
  std::string pattern;
  for (const std::string& line : lines) {
    if (line.empty() || line[0] == '#' || (line[0] == '=') != exact) continue;
    pattern += (pattern.empty() ? "" : "|") + line.substr(exact ? 1 : 0);
  }
  return pattern.empty() ? "" : "(^|[^A-Za-z])(" + pattern + ")s?([^A-Za-z]|$)";
}

bool is_text(const fs::path& file) {
  static const std::set<std::string> endings{"",     ".awk", ".bash", ".c",   ".cmake", ".cpp",  ".cu",
                                             ".cuh", ".dox", ".h",    ".hpp", ".in",    ".json", ".map",
                                             ".md",  ".py",  ".sh",   ".svg", ".toml",  ".txt",  ".yml"};
  return endings.count(file.extension().string()) > 0;
}

// The list itself, changelogs, which say what was renamed, and checkpoints that an earlier version wrote.
bool cites_old_names(const fs::path& file) {
  return file.filename() == "words.txt" || file.filename() == "CHANGELOG.md" || file.filename() == "manifest.json";
}

}  // namespace

std::vector<std::string> private_words(const fs::path& root, const fs::path& list) {
  const auto words = lines_of(list);
  std::vector<std::regex> wrong;
  if (const std::string any = pattern_of(words, false); !any.empty()) wrong.emplace_back(any, std::regex::icase);
  if (const std::string exact = pattern_of(words, true); !exact.empty()) wrong.emplace_back(exact);

  std::vector<fs::path> files;
  for (const char* folder : {"core", "plugins", "sdk", "tests", "examples", "docs", ".ci", ".github"}) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder))
      if (entry.is_regular_file() && is_text(entry.path()) && !cites_old_names(entry.path()))
        files.push_back(entry.path());
  }
  for (const auto& entry : fs::directory_iterator(root))
    if (entry.is_regular_file() && is_text(entry.path()) && !cites_old_names(entry.path()))
      files.push_back(entry.path());
  std::sort(files.begin(), files.end());

  std::vector<std::string> found;
  for (const fs::path& file : files) {
    const auto lines = lines_of(file);
    for (std::size_t i = 0; i < lines.size(); ++i)
      if (std::any_of(wrong.begin(), wrong.end(), [&](const auto& one) { return std::regex_search(lines[i], one); }))
        found.push_back(fs::relative(file, root).string() + ":" + std::to_string(i + 1) + ": " + lines[i]);
  }
  return found;
}

}  // namespace zr::arch
