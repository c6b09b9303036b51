// Changes every key of every example by one letter: it must be rejected with the right suggestion.
#include <gtest/gtest.h>
#include <toml++/toml.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "cli/trainer.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host {

namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// A key in a file: its path without indices, its position, and whether it belongs to an optimizer group.
struct LocatedKey {
  std::string path, name;
  std::size_t offset;
  bool in_group;
};

std::size_t offset_of(const std::string& text, const toml::source_position& at) {
  std::size_t offset = 0;
  for (uint32_t line = 1; line < at.line; ++line) offset = text.find('\n', offset) + 1;
  return offset + at.column - 1;
}

void collect(const toml::table& table, const std::string& text, const std::string& path, bool in_group,
             std::vector<LocatedKey>& all) {
  for (const auto& [key, node] : table) {
    const std::string name(key.str()), here = path.empty() ? name : path + "." + name;
    const std::size_t offset = offset_of(text, key.source().begin);
    if (text.compare(offset, name.size(), name) != 0)
      throw std::runtime_error(here + " is not at the position that the parser reports");
    all.push_back({here, name, offset, in_group});
    if (const auto* inner = node.as_table()) collect(*inner, text, here, in_group, all);
    if (const auto* list = node.as_array())
      for (const auto& one : *list)
        if (const auto* inner = one.as_table()) collect(*inner, text, here, true, all);
  }
}

// All variants of the name with one letter changed.
std::set<std::string> misspellings(const std::string& name) {
  std::set<std::string> all;
  for (std::size_t i = 0; i < name.size(); ++i) {
    for (const char letter : {'q', 'e'}) {
      std::string other = name;
      other[i] = letter;
      all.insert(other);
      all.insert(name.substr(0, i) + letter + name.substr(i));
    }
    if (name.size() > 1) all.insert(name.substr(0, i) + name.substr(i + 1));
    std::string swapped = name;
    if (i + 1 < name.size()) std::swap(swapped[i], swapped[i + 1]);
    all.insert(swapped);
  }
  all.erase(name);
  return all;
}

struct Job {
  plugin::Registry registry;
  std::vector<config::ConfigKey> program;

  // The error that the text causes, or "".
  std::string error_of(const std::string& text) const {
    try {
      config::Document document = config::Document::parse(text, "job.toml", {});
      plugin::PluginSelection selection = select_plugins(document, registry, document.ranks());
      selection.keys.insert(selection.keys.end(), program.begin(), program.end());
      document.check(selection.keys, 0, selection.not_loaded, nullptr, selection.unselected);
      return "";
    } catch (const Error& failure) {
      return failure.what();
    }
  }
};

// Returns the number of variants. A variant fails the test unless the error suggests the original key.
int mutate(const Job& job, const fs::path& file) {
  const std::string text = read(file);
  EXPECT_EQ(job.error_of(text), "") << file;
  std::vector<LocatedKey> keys;
  collect(toml::parse(text, std::string_view("job.toml")), text, "", false, keys);
  int tried = 0;
  for (const LocatedKey& key : keys) {
    for (const std::string& other : misspellings(key.name)) {
      const std::string changed = text.substr(0, key.offset) + other + text.substr(key.offset + key.name.size());
      const std::string error = job.error_of(changed);
      const std::string right = "'" + (key.in_group ? key.name : key.path) + "'";
      const auto asked = error.find("did you mean ");
      EXPECT_TRUE(asked != error.npos && error.find(right, asked) != error.npos)
          << file << ": '" << key.path << "' written '" << other << "': " << (error.empty() ? "accepted" : error);
      ++tried;
    }
  }
  return tried;
}

void mutate_file(const fs::path& file, const plugin::Registry& registry) {
  Job job{registry, {}};
  const config::Setting<std::string> program = config::Document::load(file.string(), {}).program();
  if (!program->empty())
    job.program = cli::query_keys(cli::find_trainer(program, file, ZR_BUILD_DIR "/bin"), file.string());
  const int tried = mutate(job, file);
  EXPECT_GE(tried, 100) << file;
  std::cout << file.string() << ": " << tried << " misspellings\n";
}

}  // namespace

TEST(MisspelledKeysTest, SuggestsTheRightKeyForAnyKeyOfAJob) {
  mutate_file(ZR_BUILD_DIR "/tests/job/job.toml", plugin::Registry({ZR_BUILD_DIR "/tests/job/plugins"}));
}

#if ZR_WITH_EXAMPLES  // else no programs are built that list their keys
TEST(MisspelledKeysTest, SuggestsTheRightKeyForAnyKeyOfAnExample) {
  int files = 0;
  for (const auto& one : fs::recursive_directory_iterator(ZR_SOURCE_DIR "/examples")) {
    if (one.path().extension() != ".toml") continue;
    mutate_file(one.path(), plugin::Registry());
    ++files;
  }
  EXPECT_GE(files, 2);
}
#endif

}  // namespace zr::host
