// docs/configuration.md is generated from the schema: the engine's keys and those of the plug-ins in plugins/.
// ZR_UPDATE_GOLDEN=1 rewrites it.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>

#include "config/foreign_keys.hpp"
#include "plugin/plugin.hpp"
#include "support/golden_cases.hpp"

namespace zr::host {
namespace {

const std::string kFile = ZR_SOURCE_DIR "/docs/configuration.md";

std::string escaped(const std::string& text) {
  std::string all;
  for (const char c : text) all += c == '|' ? std::string("\\|") : std::string(1, c);
  return all;
}

std::string default_text(const config::ConfigKey& key) {
  if (key.def.empty()) return "required";
  if (key.def[0] == '@') return "the value of `" + key.def.substr(1) + "`";
  return "`" + key.def + "`";
}

std::string table_of(const std::vector<config::ConfigKey>& keys) {
  std::string text = "| key | type | default | values | meaning |\n|---|---|---|---|---|\n";
  for (const config::ConfigKey& key : keys)
    text += "| `" + key.name + "` | " + std::string(config::type_text(key)) + (key.per_group ? ", per group" : "") +
            " | " + escaped(default_text(key)) + " | " + escaped(range_text(key)) + " | " + escaped(key.meaning) +
            " |\n";
  return text;
}

std::string generated() {
  std::vector<std::string> order;
  std::map<std::string, std::vector<config::ConfigKey>> tables;
  const auto add = [&](const config::ConfigKey& key) {
    if (!tables.count(key.table)) order.push_back(key.table);
    tables[key.table].push_back(key);
  };
  for (const config::ConfigKey& key : config::host_keys()) add(key);
  for (const plugin::PluginValidation& plugin : plugin::Registry({ZR_BUILD_DIR "/plugins"}).list())
    for (const plugin::Component& component : plugin.components)
      for (const config::ConfigKey& key : config::keys_of(component.table->keys, component.table->n_keys,
                                                          std::string(role_of(component)) + "." + component.table->id))
        add(key);
  std::string text =
      "# Configuration reference\n\n"
      "A job is one TOML file. This page lists every key of the engine and of the plug-ins that Zeroth ships. It is "
      "generated "
      "from the\nschema by a test, so it is complete. `zeroth explain FILE` shows the values of a job and where each "
      "one "
      "comes from.\n\n"
      "- Sizes are `\"32MiB\"`, `\"1.5GiB\"`, `\"100MB\"` or a number of bytes. Durations are `\"250ms\"`, `\"30s\"`, "
      "`\"5min\"`, `\"2h\"`, `\"1d\"`.\n"
      "- A path in a file (types \"path\" and \"paths\", the file of a plug-in) is relative to the folder of that "
      "file. A "
      "path on the command line, of\n  `zr::Configuration`, and a default are relative to the working directory. `~/` "
      "is "
      "the home folder, `~name/` that of a user. Paths are separated by `:`.\n"
      "- `optimizer.groups.0.lr_scale=0.1` on the command line sets a key of the first group.\n"
      "- `key=value` on the command line overrides the file: `zeroth train job.toml train.steps=10`.\n"
      "- A plug-in is chosen by `strategy = \"zero1\"`. To set its own keys, write `use = \"zero1\"` in `[strategy]` "
      "instead, and the keys in `[strategy.zero1]`.\n"
      "- `[[optimizer.groups]]` overrides keys for parameters whose names match: `match` (a pattern or several, `*` "
      "matches "
      "any\n  characters), `lr_scale`, and the optimizer's keys of type \"per group\". `use` chooses another optimizer "
      "for the "
      "group, whose\n  keys then apply. The first matching group wins.\n"
      "- `[checkpoint.rename]` maps names of this model to names in a loaded file; `*` matches the same characters "
      "in "
      "both.\n";
  for (const std::string& table : order)
    text +=
        "\n## " + (table.empty() ? std::string("Top level") : "`[" + table + "]`") + "\n\n" + table_of(tables[table]);
  return text;
}

// The table of names of other systems, between its heading and the next one.
TEST(ComingFromPage, ListsTheNamesForWhichMessagesHaveARemedy) {
  std::string table = "| name | Zeroth |\n|---|---|\n";
  for (const config::ForeignKey& key : config::foreign_keys()) {
    std::istringstream names{std::string(key.names)};
    std::string cells;
    for (std::string name; names >> name;) cells += (cells.empty() ? "`" : ", `") + name + "`";
    table += "| " + cells + " | " + escaped(std::string(key.remedy)) + " |\n";
  }
  const std::string file = ZR_SOURCE_DIR "/docs/coming-from.md", heading = "## Names of keys\n";
  std::ostringstream page;
  page << std::ifstream(file).rdbuf();
  std::string text = page.str();
  const auto begin = text.find("| name | Zeroth |", text.find(heading));
  ASSERT_NE(begin, text.npos) << file << " has no table below " << heading;
  const auto end = text.find("\n\n", begin) + 1;
  if (golden::updates()) std::ofstream(file) << text.replace(begin, end - begin, table);
  EXPECT_EQ(golden::updates() ? table : text.substr(begin, end - begin), table)
      << file << " differs from plugins/foreign_keys.inc; ZR_UPDATE_GOLDEN=1 rewrites it";
}

TEST(ConfigurationReference, MatchesTheSchema) {
  const std::string text = generated();
  if (golden::updates()) std::ofstream(kFile) << text;
  std::ostringstream now;
  now << std::ifstream(kFile).rdbuf();
  EXPECT_EQ(now.str(), text) << kFile << " differs from the schema; ZR_UPDATE_GOLDEN=1 rewrites it";
}

}  // namespace
}  // namespace zr::host
