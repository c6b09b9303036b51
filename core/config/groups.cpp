#include "config/groups.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/error.hpp"
#include "config/foreign_keys.hpp"
#include "config/key_suggestion.hpp"

namespace zr::host::config {

namespace {

class Groups {
 public:
  Groups(const std::vector<ConfigKey>& keys, const std::vector<Entry>& entries, Problems& problems)
      : keys_(keys), entries_(entries), problems_(problems) {}

  std::vector<GroupConfig> run(const toml::table& root) {
    const toml::node* node = node_at(root, "optimizer.groups");
    if (!node) return {};
    if (!node->is_array_of_tables()) {
      problems_.add(origin_of(node->source()),
                    "optimizer.groups: expected an array of tables; write each group as [[optimizer.groups]]");
      return {};
    }
    for (const auto& table : *node->as_array()) group(*table.as_table());
    return std::move(groups_);
  }

 private:
  void group(const toml::table& table) {
    GroupConfig group;
    group.origin = node_origin(table);
    ConfigKey scale{"optimizer.groups", "lr_scale", ZR_KEY_FLOAT, "1.0",
                    "the group's learning rate, in units of optimizer.lr"};
    scale.min = 0;
    if (const toml::node* use = table.get("use")) optimizer_of(*use, group);
    table_ = "optimizer." + (group.use.empty() ? main_optimizer() : group.use);
    for (const auto& [key, node] : table) {
      if (key == "match") {
        patterns(node, group);
        if (const Origin given = node_origin(node); given.from == Origin::From::command_line) group.origin = given;
      } else if (key == "use") {
        continue;
      } else if (key == "lr_scale") {
        if (const auto entry = group_value(scale, node)) group.lr_scale = std::get<double>(entry->value);
      } else if (const ConfigKey* declared = plugin_key(key.str()); declared && declared->per_group) {
        if (auto entry = group_value(*declared, node)) group.given_values.push_back(std::move(*entry));
      } else {
        no_group_key(key_origin(key, node), std::string(key.str()), declared);
      }
    }
    if (!table.contains("match"))
      problems_.add(group.origin,
                    "missing key 'match' in [[optimizer.groups]]: name patterns such as [\"*.bias\", \"norm*\"]");
    for (const Entry& entry : entries_) {
      if (!is_plugin_key(entry.key)) continue;
      const auto own = std::find_if(group.given_values.begin(), group.given_values.end(),
                                    [&](const Entry& e) { return e.key.name == entry.key.name; });
      group.values.push_back(own == group.given_values.end() ? entry : *own);
    }
    groups_.push_back(std::move(group));
  }

  // True for keys of the group's optimizer.
  bool is_plugin_key(const ConfigKey& key) const { return key.table == table_; }

  // The id of the job's optimizer; [optimizer] use may be the path of its file.
  std::string main_optimizer() const {
    for (const Entry& entry : entries_) {
      if (!entry.key.table.empty() || entry.key.name != "optimizer") continue;
      std::string id = std::get<std::string>(entry.value);
      const std::string start = "zr_optimizer_", end = ".so";
      if (id.empty() || id[0] != '/') return id;
      id.erase(0, id.rfind('/') + 1);
      if (id.rfind(start, 0) == 0) id.erase(0, start.size());
      if (id.size() > end.size() && id.compare(id.size() - end.size(), end.size(), end) == 0)
        id.resize(id.size() - end.size());
      return id;
    }
    return "";
  }

  void optimizer_of(const toml::node& node, GroupConfig& group) {
    if (const auto* text = node.as_string(); text && !text->get().empty() && text->get()[0] != '/')
      group.use = text->get();
    else
      problems_.add(origin_of(node.source()),
                    "optimizer.groups: use: expected the id of an optimizer, such as \"acme.lion\"; its file must be "
                    "in a folder of ZR_PLUGIN_PATH or of the installation");
  }

  const ConfigKey* plugin_key(std::string_view name) const {
    for (const ConfigKey& key : keys_)
      if (key.name == name && is_plugin_key(key)) return &key;
    return nullptr;
  }

  void no_group_key(const Origin& origin, const std::string& name, const ConfigKey* declared) {
    if (declared)
      return problems_.add(origin,
                           fmt::format("'{}' cannot differ between groups; write it in [{}]", name, declared->table));
    std::vector<std::string> accepted{"match", "use", "lr_scale"};
    for (const ConfigKey& key : keys_)
      if (key.per_group && is_plugin_key(key)) accepted.push_back(key.name);
    const auto near = all_nearest(name, accepted);
    if (const std::string_view remedy = foreign_remedy(name); !remedy.empty() && near.empty())
      return problems_.add(origin, fmt::format("unknown key '{}' in [[optimizer.groups]]; {}", name, remedy));
    std::string list;
    for (const auto& name_of_key : accepted) list += (list.empty() ? "; a group accepts " : ", ") + name_of_key;
    problems_.add(origin, fmt::format("unknown key '{}' in [[optimizer.groups]]{}", name,
                                      near.empty() ? list : did_you_mean(near)));
  }

  std::optional<Entry> group_value(const ConfigKey& key, const toml::node& node) {
    ParsedValue got = parse_value(key, node, nullptr);
    const Origin origin = origin_of(node.source());
    if (got.problem.empty()) return Entry{key, std::move(got.value), std::move(got.written), origin};
    problems_.add(origin, fmt::format("optimizer.groups: {}: {}", key.name, got.problem));
    return {};
  }

  void patterns(const toml::node& node, GroupConfig& group) {
    if (const auto* text = node.as_string()) group.match.push_back(text->get());
    if (const auto* list = node.as_array())
      for (const auto& pattern : *list)
        if (const auto* text = pattern.as_string()) group.match.push_back(text->get());
    const std::size_t given = node.is_array() ? node.as_array()->size() : 1;
    if (group.match.empty() || group.match.size() != given)
      problems_.add(origin_of(node.source()),
                    "optimizer.groups: match: expected name patterns such as [\"*.bias\", \"norm*\"]");
  }

  const std::vector<ConfigKey>& keys_;
  const std::vector<Entry>& entries_;
  Problems& problems_;
  std::string table_;  // "optimizer.<id>" of the current group
  std::vector<GroupConfig> groups_;
};

}  // namespace

std::vector<GroupConfig> read_groups(const toml::table& root, const std::vector<ConfigKey>& keys,
                                     const std::vector<Entry>& entries, Problems& problems) {
  return Groups(keys, entries, problems).run(root);
}

std::vector<Rename> read_renames(const toml::table& root, Problems& problems) {
  std::vector<Rename> renames;
  const toml::node* node = node_at(root, "checkpoint.rename");
  if (!node) return {};
  if (!node->is_table()) {
    problems.add(origin_of(node->source()),
                 "checkpoint.rename: expected a table; write [checkpoint.rename] and below it \"name in the model\" = "
                 "\"name in the file\"");
    return {};
  }
  for (const auto& [key, value] : *node->as_table()) {
    const auto* theirs = value.as_string();
    const std::string ours(key.str());
    const auto stars = [](const std::string& text) { return std::count(text.begin(), text.end(), '*'); };
    if (!theirs)
      problems.add(key_origin(key, value),
                   fmt::format("checkpoint.rename: '{}': expected a string, the name in the file", ours));
    else if (stars(ours) < stars(theirs->get()))
      problems.add(
          key_origin(key, value),
          fmt::format(
              "checkpoint.rename: '{}': '{}' has more `*` than '{}'; each `*` on the right needs one on the left", ours,
              theirs->get(), ours));
    else
      renames.push_back({ours, theirs->get(), key_origin(key, value)});
  }
  // Exact names come before patterns, longer patterns before shorter ones.
  const auto rank = [](const Rename& r) { return std::pair(r.ours.find('*') != r.ours.npos, -std::ssize(r.ours)); };
  std::stable_sort(renames.begin(), renames.end(), [&](const Rename& a, const Rename& b) { return rank(a) < rank(b); });
  return renames;
}

}  // namespace zr::host::config
