// Links between the Markdown files of the tree: the file exists, and the heading that an anchor names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

const fs::path kRoot = ZR_SOURCE_DIR;

std::vector<fs::path> pages() {
  std::vector<fs::path> all;
  for (const auto& entry : fs::directory_iterator(kRoot))
    if (entry.path().extension() == ".md") all.push_back(entry.path());
  for (const char* folder : {"docs", "core", "plugins", "sdk", "tests", "examples"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder))
      if (entry.path().extension() == ".md") all.push_back(entry.path());
  std::sort(all.begin(), all.end());
  return all;
}

// Calls fn for every line outside of code blocks.
void each_line(const fs::path& page, const std::function<void(const std::string& line, int number)>& fn) {
  std::ifstream in(page);
  bool in_code = false;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.rfind("```", 0) == 0) in_code = !in_code;
    if (!in_code && line.rfind("    ", 0) != 0) fn(line, number);
  }
}

// The anchor that GitHub and MkDocs give a heading.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading) {
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-')
      anchor += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (c == ' ') anchor += '-';
  }
  return anchor;
}

std::set<std::string> anchors_in(const fs::path& page) {
  std::set<std::string> all;
  each_line(page, [&](const std::string& line, int) {
    if (line.empty() || line[0] != '#') return;
    const auto text = line.find_first_not_of("# ");
    if (text != line.npos) all.insert(anchor_of(line.substr(text)));
  });
  return all;
}

TEST(Documentation, LinksLeadToFilesAndHeadingsThatExist) {
  static const std::regex link(R"(\]\(([^)\s]+)\))");
  int checked = 0;
  for (const fs::path& page : pages())
    each_line(page, [&](const std::string& line, int number) {
      for (std::sregex_iterator at(line.begin(), line.end(), link), none; at != none; ++at) {
        const std::string target = (*at)[1];
        if (target.find("://") != target.npos || target.rfind("mailto:", 0) == 0) continue;
        const auto hash = target.find('#');
        const fs::path file = hash == 0 ? page : page.parent_path() / target.substr(0, hash);
        const std::string where = fs::relative(page, kRoot).string() + ":" + std::to_string(number) + ": " + target;
        ++checked;
        EXPECT_TRUE(fs::exists(file)) << where;
        if (hash != target.npos && fs::exists(file)) {
          EXPECT_TRUE(anchors_in(file).count(target.substr(hash + 1))) << where << ": no such heading";
        }
      }
    });
  EXPECT_GT(checked, 20);
}

TEST(Documentation, IndexLinksToEveryPage) {
  std::string index;
  each_line(kRoot / "docs/index.md", [&](const std::string& line, int) { index += line + "\n"; });
  for (const auto& entry : fs::directory_iterator(kRoot / "docs"))
    if (entry.path().extension() == ".md" && entry.path().filename() != "index.md") {
      EXPECT_NE(index.find("(" + entry.path().filename().string() + ")"), index.npos) << entry.path();
    }
}

}  // namespace
