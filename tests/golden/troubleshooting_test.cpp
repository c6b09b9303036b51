// docs/troubleshooting.md: each quoted fragment of a message is in a golden file or in the source that prints it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

const fs::path kTree = ZR_SOURCE_DIR;
constexpr std::size_t kMinLength = 3;  // of a part of a fragment: shorter ones are only punctuation
constexpr std::size_t kMaxGap = 400;   // characters of source or message that "..." stands for

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// A source file on one line, with adjacent string literals joined and quotes not escaped, so that a message is one
// piece except for its variable parts.
std::string messages_of(const std::string& source) {
  static const std::regex adjacent("\"\\s*\n\\s*\""), line_end("\\s*\n\\s*"), escaped("\\\\\"");
  return std::regex_replace(std::regex_replace(std::regex_replace(source, adjacent, ""), line_end, " "), escaped, "\"");
}

// The parts of a fragment between its "...".
std::vector<std::string> parts_of(const std::string& fragment) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= fragment.size();) {
    const std::size_t end = std::min(fragment.find("...", at), fragment.size());
    std::string part = fragment.substr(at, end - at);
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    if (part.size() >= kMinLength) parts.push_back(part);
    at = end + 3;
  }
  return parts;
}

// True if the text has all parts in this order, each at most kMaxGap after the one before.
bool contains(const std::string& text, const std::vector<std::string>& parts) {
  for (std::size_t begin = text.find(parts[0]); begin != text.npos; begin = text.find(parts[0], begin + 1)) {
    std::size_t at = begin + parts[0].size(), i = 1;
    for (; i < parts.size(); ++i) {
      const std::size_t next = text.find(parts[i], at);
      if (next == text.npos || next - at > kMaxGap) break;
      at = next + parts[i].size();
    }
    if (i == parts.size()) return true;
  }
  return false;
}

// The fragments of a page as "line: fragment": text in backticks in the first column of the tables of messages.
std::vector<std::pair<int, std::string>> fragments_of(const std::string& page) {
  static const std::regex quoted("`([^`]+)`");
  std::vector<std::pair<int, std::string>> all;
  std::istringstream lines(page);
  bool messages = false;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.rfind("| message contains |", 0) == 0) messages = true;
    if (line.rfind('|', 0) != 0) messages = false;
    if (!messages) continue;
    const std::string cell = line.substr(0, line.find(" | "));
    for (std::sregex_iterator at(cell.begin(), cell.end(), quoted), none; at != none; ++at)
      all.emplace_back(number, (*at)[1]);
  }
  return all;
}

std::vector<std::string> texts() {
  std::vector<std::string> all;
  for (const auto& entry : fs::directory_iterator(kTree / "tests/golden"))
    if (entry.path().extension() == ".txt") all.push_back(text_of(entry.path()));
  for (const char* folder : {"core", "plugins", "sdk/include"})
    for (const auto& entry : fs::recursive_directory_iterator(kTree / folder))
      if (const auto end = entry.path().extension(); end == ".cpp" || end == ".hpp")
        all.push_back(messages_of(text_of(entry.path())));
  return all;
}

TEST(TroubleshootingTest, QuotesMessagesThatExist) {
  const auto all = texts();
  const std::pair<const char*, std::size_t> pages[] = {{"docs/troubleshooting.md", 150}, {"docs/devices.md", 7}};
  for (const auto& [page, least] : pages) {
    const auto fragments = fragments_of(text_of(kTree / page));
    for (const auto& [line, fragment] : fragments) {
      const auto parts = parts_of(fragment);
      EXPECT_TRUE(!parts.empty() &&
                  std::any_of(all.begin(), all.end(), [&](const std::string& text) { return contains(text, parts); }))
          << page << ":" << line << ": no message contains: " << fragment;
    }
    EXPECT_GE(fragments.size(), least) << page;
  }
}

TEST(TroubleshootingTest, FindsAMessageThatChanged) {
  EXPECT_THAT(
      fragments_of("`text`\n| message contains | meaning |\n|---|---|\n| `a ... b`, `c` | `d` |\n\n| `e` | f |\n"),
      testing::ElementsAre(testing::Pair(4, "a ... b"), testing::Pair(4, "c")));
  const std::string source =
      messages_of("fail(\"cannot read \" + file +\n     \" of \"\n     \"rank \\\"0\\\"\" + reason);\n");
  EXPECT_TRUE(contains(source, parts_of("cannot read ... of rank \"0\"")));
  EXPECT_FALSE(contains(source, parts_of("cannot read ... of rank \"1\"")));
  EXPECT_FALSE(contains(source, parts_of("of rank ... cannot read")));
  EXPECT_FALSE(contains("first" + std::string(kMaxGap + 1, ' ') + "second", parts_of("first ... second")));
}

}  // namespace
