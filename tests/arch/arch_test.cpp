// The structure of the tree, as rules that fail: DESIGN.md 1 and 2.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
const fs::path kRoot = ZR_SOURCE_DIR;
const std::vector<std::string> kRooms{"base",  "config",  "plan",       "plugin", "comm", "model",
                                      "shard", "offload", "checkpoint", "engine", "cli",  "api"};

std::vector<std::string> lines_of(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

bool is_code(const fs::path& file) {
  static const std::set<std::string> endings{".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".cmake", ".py", ".sh"};
  return endings.count(file.extension().string()) > 0 || file.filename() == "CMakeLists.txt";
}

std::vector<fs::path> code_below(const std::vector<std::string>& folders) {
  std::vector<fs::path> files;
  for (const auto& folder : folders)
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder))
      if (entry.is_regular_file() && is_code(entry.path())) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string path_of(const fs::path& file) { return fs::relative(file, kRoot).string(); }

// "file:line: text" of every line that matches.
std::vector<std::string> hits(const std::vector<fs::path>& files, const std::regex& wrong) {
  std::vector<std::string> found;
  for (const fs::path& file : files) {
    const auto lines = lines_of(file);
    for (std::size_t i = 0; i < lines.size(); ++i)
      if (std::regex_search(lines[i], wrong))
        found.push_back(path_of(file) + ":" + std::to_string(i + 1) + ": " + lines[i]);
  }
  return found;
}

std::size_t rank_of_room(const std::string& room) {
  return static_cast<std::size_t>(std::find(kRooms.begin(), kRooms.end(), room) - kRooms.begin());
}

const std::regex kInclude(R"re(^\s*#\s*include\s+["<]([a-z_]+)/)re");

TEST(Architecture, ARoomIncludesOnlyRoomsAboveIt) {
  std::vector<std::string> wrong;
  for (const fs::path& file : code_below({"core"})) {
    const std::string room = (*++fs::relative(file, kRoot).begin()).string();
    ASSERT_TRUE(rank_of_room(room) < kRooms.size() || room == "CMakeLists.txt") << path_of(file) << " is in no room";
    for (const std::string& line : lines_of(file)) {
      std::smatch match;
      if (!std::regex_search(line, match, kInclude)) continue;
      const std::size_t used = rank_of_room(match[1]);
      if (used < kRooms.size() && used > rank_of_room(room)) wrong.push_back(path_of(file) + ": " + line);
    }
  }
  EXPECT_EQ(wrong, std::vector<std::string>{});
}

TEST(Architecture, AnUpwardIncludeWouldBeSeen) {
  std::smatch match;
  const std::string line = "#include \"engine/session.hpp\"";
  ASSERT_TRUE(std::regex_search(line, match, kInclude));
  EXPECT_GT(rank_of_room(match[1]), rank_of_room("base"));
}

TEST(Architecture, TheCoreKnowsNoPluginByName) {
  std::set<std::string> names;
  for (const char* folder : {"plugins", "plugins/optimizers"})
    for (const auto& entry : fs::directory_iterator(kRoot / folder))
      if (entry.is_directory() && entry.path().filename() != "optimizers")
        names.insert(entry.path().filename().string());
  ASSERT_TRUE(names.count("zero1") && names.count("adamw") && names.count("comm_shm"));
  std::string pattern;
  for (const std::string& name : names) {
    pattern += (pattern.empty() ? "" : "|") + name;
    for (const std::string prefix : {"comm_", "offload_"})
      if (name.rfind(prefix, 0) == 0) pattern += "|" + name.substr(prefix.size());
  }
  EXPECT_EQ(hits(code_below({"core"}), std::regex("\\b(" + pattern + ")\\b")), std::vector<std::string>{});
}

TEST(Architecture, TheCoreDoesNotAskForTheStage) {
  EXPECT_EQ(hits(code_below({"core"}), std::regex(R"(if\s*\(\s*stage)")), std::vector<std::string>{});
}

TEST(Architecture, LibtorchStaysInItsRooms) {
  std::vector<fs::path> files;
  for (const fs::path& file : code_below({"core", "plugins", "sdk"})) {
    const std::string path = path_of(file);
    if (path.rfind("core/model/", 0) != 0 && path.rfind("core/api/", 0) != 0) files.push_back(file);
  }
  EXPECT_EQ(hits(files, std::regex(R"re(#\s*include\s+["<](torch|ATen|c10)/)re")), std::vector<std::string>{});
}

TEST(Architecture, PluginsAreWrittenFromTheSdkAlone) {
  EXPECT_EQ(
      hits(
          code_below({"plugins"}),
          std::regex(
              R"re(#\s*include\s+["<](base|config|plan|plugin|comm|model|shard|offload|checkpoint|engine|cli|api)/)re")),
      std::vector<std::string>{});
}

TEST(Architecture, NoFileIsLongerThan600Lines) {
  std::vector<std::string> wrong;
  for (const fs::path& file : code_below({"core", "plugins", "sdk", "tests", "examples"}))
    if (const auto n = lines_of(file).size(); n > 600)
      wrong.push_back(path_of(file) + ": " + std::to_string(n) + " lines");
  EXPECT_EQ(wrong, std::vector<std::string>{});
}

TEST(Architecture, EveryRoomAndPluginHasAReadme) {
  std::vector<std::string> wrong;
  std::vector<fs::path> folders;
  for (const auto& room : kRooms)
    if (fs::exists(kRoot / "core" / room / "CMakeLists.txt")) folders.push_back(kRoot / "core" / room);
  for (const char* folder : {"plugins", "plugins/optimizers"})
    for (const auto& entry : fs::directory_iterator(kRoot / folder))
      if (entry.is_directory() && entry.path().filename() != "optimizers") folders.push_back(entry.path());
  for (const fs::path& folder : folders)
    if (!fs::exists(folder / "README.md")) wrong.push_back(path_of(folder));
  EXPECT_EQ(wrong, std::vector<std::string>{});
}

// A function declared in a paragraph (lines without a blank between) that holds no comment is undocumented.
std::vector<std::string> undocumented(const std::vector<std::string>& lines) {
  static const std::regex declaration(
      R"(^\s{0,4}(?!return|using|inline namespace|static_assert|std::|#|//|\}|if|for)[A-Za-z_][\w:<>,&\*\s\[\]]*\b\w+\([^;{]*\)\s*(const|noexcept)?[^;{]*[;{])");
  std::vector<std::string> wrong, open;
  bool documented = false, hidden = false, layer = false;
  const auto close = [&] {
    if (!documented) wrong.insert(wrong.end(), open.begin(), open.end());
    open.clear();
    documented = false;
  };
  for (const std::string& line : lines) {
    if (line.find_first_not_of(" \t") == std::string::npos) close();
    // A layer is the glue between an author's class and the table: nobody calls it by name.
    if (std::regex_search(line, std::regex("^class \\w+Layer"))) layer = true;
    hidden |= layer || line.find("private:") != std::string::npos;
    if (line.rfind("}", 0) == 0) hidden = layer = false;
    if (line.find("public:") != std::string::npos && !layer) hidden = false;
    documented |= line.find("//") != std::string::npos || line.find("/*") != std::string::npos ||
                  line.find(" * ") != std::string::npos;
    if (!hidden && std::regex_search(line, declaration)) open.push_back(line);
  }
  close();
  return wrong;
}

TEST(Architecture, EveryPublicFunctionIsDocumented) {
  for (const fs::path& file : code_below({"core/api/include", "sdk/include"}))
    EXPECT_EQ(undocumented(lines_of(file)), std::vector<std::string>{}) << path_of(file);
}

TEST(Architecture, AnUndocumentedFunctionWouldBeSeen) {
  EXPECT_EQ(undocumented({"class A {", " public:", "", "  int size() const;", "", "  /// Empties it.",
                          "  void clear();", " private:", "", "  int n();", "};"}),
            std::vector<std::string>{"  int size() const;"});
}

TEST(Architecture, TheTopLevelIsFixed) {
  const std::set<std::string> allowed{"core",  "plugins", "sdk",  "tests", "examples",
                                      "build", "runs",    ".git", ".ci",   ".cache"};
  for (const auto& entry : fs::directory_iterator(kRoot))
    EXPECT_TRUE(!entry.is_directory() || allowed.count(entry.path().filename().string())) << entry.path();
}

}  // namespace
