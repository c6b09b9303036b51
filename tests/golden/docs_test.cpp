// The Markdown files of the tree: links, files, and calls of the C++ API that they name exist.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
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
void for_each_line(const fs::path& page, const std::function<void(const std::string& line, int number)>& fn) {
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
  for_each_line(page, [&](const std::string& line, int) {
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
    for_each_line(page, [&](const std::string& line, int number) {
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
  for_each_line(kRoot / "docs/index.md", [&](const std::string& line, int) { index += line + "\n"; });
  for (const auto& entry : fs::directory_iterator(kRoot / "docs"))
    if (entry.path().extension() == ".md" && entry.path().filename() != "index.md") {
      EXPECT_NE(index.find("(" + entry.path().filename().string() + ")"), index.npos) << entry.path();
    }
}

// Calls fn for each text in backticks, with its page and line.
void for_each_quoted(const std::vector<fs::path>& of,
                     const std::function<void(const std::string& text, const std::string& where)>& fn) {
  static const std::regex quoted("`([^`]+)`");
  for (const fs::path& page : of)
    for_each_line(page, [&](const std::string& line, int number) {
      // In a table of coming-from.md the first column has the names of others.
      const std::size_t begin = page.filename() == "coming-from.md" && line[0] == '|' ? line.find(" | ") : 0;
      if (begin == line.npos) return;
      for (std::sregex_iterator at(line.begin() + static_cast<std::ptrdiff_t>(begin), line.end(), quoted), none;
           at != none; ++at)
        fn((*at)[1], fs::relative(page, kRoot).string() + ":" + std::to_string(number));
    });
}

TEST(Documentation, NamesFilesThatExist) {
  static const std::regex path(R"((core|plugins|sdk|tests|examples|docs|\.ci|\.github)/[\w./-]+)");
  int checked = 0;
  for_each_quoted(pages(), [&](const std::string& text, const std::string& where) {
    if (!std::regex_match(text, path)) return;
    ++checked;
    bool exists = false;
    for (const char* ending : {"", ".cpp", ".hpp"}) exists = exists || fs::exists(kRoot / (text + ending));
    EXPECT_TRUE(exists) << where << ": there is no " << text;
  });
  EXPECT_GT(checked, 50);
}

TEST(Documentation, NamesCallsThatExist) {
  std::string headers;
  for (const char* folder : {"core/api/include", "core/base/include", "sdk/include", "core/python/zeroth"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder))
      if (entry.is_regular_file()) {
        std::ifstream in(entry.path());
        headers.append(std::istreambuf_iterator<char>(in), {});
      }
  std::set<std::string> names;
  static const std::regex word("\\w+"), call("\\bengine\\.(\\w+)\\(|\\bzr::(\\w+)");
  for (std::sregex_iterator at(headers.begin(), headers.end(), word), none; at != none; ++at) names.insert(at->str());
  std::vector<fs::path> users{kRoot / "README.md"};
  for (const auto& entry : fs::directory_iterator(kRoot / "docs"))
    if (entry.path().extension() == ".md") users.push_back(entry.path());
  int checked = 0;
  for_each_quoted(users, [&](const std::string& text, const std::string& where) {
    for (std::sregex_iterator at(text.begin(), text.end(), call), none; at != none; ++at) {
      const std::string name = (*at)[1].matched ? (*at)[1] : (*at)[2];
      EXPECT_TRUE(names.count(name)) << where << ": no installed header declares " << name;
      ++checked;
    }
  });
  EXPECT_GT(checked, 100);
}

}  // namespace
