#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <tuple>

#include "base/failure.hpp"
#include "base/text.hpp"
#include "config/batch.hpp"
#include "config/config.hpp"
#include "config/document_tree.hpp"
#include "config/key_suggestion.hpp"
#include "config/precision.hpp"

namespace zr::host {

namespace {

constexpr std::size_t kMaxNameBytes = 200;  // file systems allow 255, and the run folder adds suffixes

// The origin of a value; for a table that the command line created, the origin of its first value.
Origin node_origin(const toml::node& node) {
  const Origin origin = origin_of(node.source());
  const toml::table* table = node.as_table();
  return origin.from == Origin::From::key_default && table && !table->empty() ? node_origin(table->begin()->second)
                                                                              : origin;
}

// The origin of a key: its own, or that of its value if toml++ has none (overrides of the command line).
Origin key_origin(const toml::key& key, const toml::node& node) {
  const Origin origin = origin_of(key.source());
  const Origin value = node_origin(node);
  return origin.from == Origin::From::file && value.from != Origin::From::command_line ? origin : value;
}

}  // namespace

// One run of Document::check: collects all problems of the file before it throws.
class Check {
 public:
  Check(const Document::Tree& tree, const Document& document, const std::vector<ConfigKey>& more,
        const PluginIds& unread, std::vector<UncheckedValue>* unchecked)
      : tree_(tree), unread_(unread), unchecked_(unchecked), keys_(host_keys()) {
    keys_.insert(keys_.end(), more.begin(), more.end());
    for (const auto& role : roles()) chosen_[role] = document.chosen(role);
    for (const ConfigKey& key : keys_) declare(key);
    for (const auto& [role, id] : chosen_)
      if (id.find('/') == id.npos) tables_.insert(role + "." + id);
  }

  JobConfig run(int world) {
    names(tree_.root, "");
    for (const ConfigKey& key : keys_) value(key);
    groups();
    renames();
    throw_problems();
    keep_chosen_schedule();
    references();
    ranks(world);
    run_name();
    batch();
    for (const auto& [path, wrong] : precision_problems(config_)) problem(entry(path).origin, path + ": " + wrong);
    checkpoints();
    throw_problems();
    return std::move(config_);
  }

 private:
  struct Problem {
    Origin origin;
    std::string text;
  };

  // Problems after the first 20 are only counted, so that a file full of mistakes is reported quickly.
  static constexpr std::size_t kMaxProblems = 20;
  void problem(const Origin& origin, const std::string& text) {
    problems_.size() < kMaxProblems ? problems_.push_back({origin, text}) : void(++more_problems_);
  }

  void throw_problems() {
    if (problems_.empty()) return;
    std::stable_sort(problems_.begin(), problems_.end(), [](const Problem& a, const Problem& b) {
      return std::tuple(a.origin.from, a.origin.line, a.origin.column) <
             std::tuple(b.origin.from, b.origin.line, b.origin.column);
    });
    std::string all;
    for (const Problem& one : problems_) {
      const bool placed = one.origin.from != Origin::From::key_default;
      all += (all.empty() ? "" : "\n") + (placed ? one.origin.text() : tree_.file) + ": " + one.text;
    }
    if (more_problems_ > 0) all += "\n" + tree_.file + ": " + std::to_string(more_problems_) + " more problems";
    fail_user(all);
  }

  void declare(const ConfigKey& key) {
    const std::string bad = declaration_problem(key);
    if (!bad.empty()) fail_bug(bad);
    const bool role = key.table.empty() && std::find(roles().begin(), roles().end(), key.name) != roles().end();
    if (key.table.empty() && !role) fail_bug("the key '" + key.name + "' has no table; declare it as \"table.key\"");
    const std::string path = role ? key.name + ".use" : key.path();
    if (!paths_.insert(path).second) fail_bug("the key '" + path + "' is declared twice");
    for (std::string table = role ? key.name : key.table; !table.empty();) {
      tables_.insert(table);
      const auto dot = table.rfind('.');
      table.resize(dot == table.npos ? 0 : dot);
    }
  }

  bool is_unread(const std::string& path) const {
    const auto dot = path.find('.');
    const auto at = unread_.find(path.substr(0, dot));
    return dot != path.npos && at != unread_.end() &&
           std::find(at->second.begin(), at->second.end(), path.substr(dot + 1)) != at->second.end();
  }

  // Checks that every name in the file is a key, a table, or a table of a plug-in that was not loaded.
  void names(const toml::table& table, const std::string& path) {
    for (const auto& [key, node] : table) {
      const std::string here = join(path, key.str());
      if (paths_.count(here) || here == "optimizer.groups" || here == "checkpoint.rename") continue;
      const bool role = path.empty() && chosen_.count(here);
      if (is_unread(here)) continue;
      if (tables_.count(here) && node.is_table()) {
        names(*node.as_table(), here);
      } else if (tables_.count(here) && !role) {
        problem(key_origin(key, node), "'" + here + "' is a table; write [" + here + "] and its keys below");
      } else if (!role && unchecked_) {
        gather_unchecked(key, node, here);
      } else if (!role) {
        unknown(key_origin(key, node), here, node.is_table() || node.is_array_of_tables());
      }
    }
  }

  void gather_unchecked(const toml::key& key, const toml::node& node, const std::string& path) {
    if (const toml::table* table = node.as_table()) {
      for (const auto& [inner, value] : *table) gather_unchecked(inner, value, join(path, inner.str()));
      return;
    }
    const auto raw = tree_.overrides.find(path);
    unchecked_->push_back(
        {path, raw == tree_.overrides.end() ? source_text(node) : raw->second, key_origin(key, node)});
  }

  void unknown(const Origin& origin, const std::string& path, bool is_table) {
    if (problems_.size() >= kMaxProblems) return void(++more_problems_);  // finding the nearest name is slow
    if (const std::string_view now = renamed(path); !now.empty())
      return problem(origin, "the key '" + path + "' was renamed; write '" + std::string(now) + "'");
    std::vector<std::string> candidates(tables_.begin(), tables_.end());
    for (const auto& [role, ids] : unread_)
      for (const auto& id : ids) candidates.push_back(join(role, id));
    if (!is_table || path.rfind("optimizer.", 0) == 0) {
      candidates.insert(candidates.end(), paths_.begin(), paths_.end());
      candidates.push_back("optimizer.groups");
      candidates.push_back("checkpoint.rename");
    }
    problem(origin, std::string("unknown ") + (is_table ? "table" : "key") + " '" + path + "'" +
                        key_suggestion(path, candidates));
  }

  void value(const ConfigKey& key) {
    const bool role = key.table.empty();
    std::string path = key.path();
    const toml::node* node = node_at(tree_.root, path);
    if (role && node && node->is_table()) node = node_at(tree_.root, path += ".use");
    Entry entry{key, {}, {}, {}};
    if (node) {
      const auto raw = tree_.overrides.find(role ? key.name + ".use" : path);
      ParsedValue got = parse_value(key, *node, raw == tree_.overrides.end() ? nullptr : &raw->second);
      entry.origin = origin_of(node->source());
      if (!got.problem.empty()) return problem(entry.origin, path + ": " + got.problem);
      entry.value = std::move(got.value);
      entry.written = std::move(got.written);
    } else if (key.def.empty()) {
      return missing(key);
    } else if (key.def[0] != '@') {
      ParsedValue standard = default_value(key);
      entry.value = std::move(standard.value);
      entry.written = std::move(standard.written);
    }
    config_.entries_.push_back(std::move(entry));
  }

  void missing(const ConfigKey& key) {
    if (!problems_.empty()) return;  // one of the problems may be this key, misspelt
    const toml::node* table = node_at(tree_.root, key.table);
    problem(table ? origin_of(table->source()) : Origin{},
            "missing key '" + key.path() + "' (" + key.meaning + "); write it in [" + key.table + "]");
  }

  // Resolves defaults that refer to the value of another key.
  void references() {
    for (Entry& entry : config_.entries_) {
      if (!entry.written.empty()) continue;
      const Entry& other = config_.entry(entry.key.def.substr(1));
      entry.value = other.value;
      entry.written = other.written;
      if (entry.key.type == ZR_KEY_FLOAT) entry.value = config_.number(other.key.path());
    }
  }

  void keep_chosen_schedule() {
    const std::string keep = "schedule." + config_.text("schedule.use");
    std::erase_if(config_.entries_, [&](const Entry& entry) {
      return entry.key.table.rfind("schedule.", 0) == 0 && entry.key.table != keep;
    });
  }

  Entry& entry(std::string_view path) {
    for (Entry& one : config_.entries_)
      if (one.key.path() == path) return one;
    fail_bug("the key '" + std::string(path) + "' was not declared");
  }

  // The launcher decides the number of ranks; job.ranks is a request to `zeroth train`.
  void ranks(int world) {
    Entry& ranks = entry("job.ranks");
    world_ = std::get<int64_t>(ranks.value);
    if (world <= 0 || world == world_) return;
    world_ = world;
    ranks.value = world_;
    ranks.written = std::to_string(world_);
    ranks.origin = {};
    ranks.origin.from = Origin::From::launcher;
  }

  void run_name() {
    Entry& name = entry("job.name");
    std::string& text = std::get<std::string>(name.value);
    if (text.empty()) text = std::filesystem::path(tree_.file).stem().string();
    if (text.empty() || text == "." || text == ".." || text.find('/') != text.npos)
      problem(name.origin, "job.name: expected the name of one folder, found " + toml_quoted(text));
    else if (text.size() > kMaxNameBytes)
      problem(name.origin, "job.name: expected a name of at most " + std::to_string(kMaxNameBytes) +
                               " bytes, found one of " + std::to_string(text.size()));
    else if (printable(text) != text)
      problem(name.origin, "job.name: expected a name without control characters, found " + toml_quoted(text));
    name.written = toml_quoted(text);
  }

  void batch() {
    Entry &global = entry("train.global_batch"), &micro = entry("train.micro_batch"),
          &times = entry("train.gradient_accumulation");
    Origin first;
    for (const Entry* one : {&times, &micro, &global})
      if (one->origin.from != Origin::From::key_default) first = one->origin;
    const std::string wrong = derive_batch(global, micro, times, world_);
    if (!wrong.empty()) problem(first, wrong);
  }

  void groups() {
    const toml::node* node = node_at(tree_.root, "optimizer.groups");
    if (!node) return;
    if (!node->is_array_of_tables())
      return problem(origin_of(node->source()),
                     "optimizer.groups: expected an array of tables; write each group as [[optimizer.groups]]");
    for (const auto& one : *node->as_array()) group(*one.as_table());
  }

  void group(const toml::table& table) {
    GroupConfig group;
    group.origin = origin_of(table.source());
    ConfigKey scale{"optimizer.groups", "lr_scale", ZR_KEY_FLOAT, "1.0",
                    "the group's learning rate, in units of optimizer.lr"};
    scale.min = 0;
    for (const auto& [key, node] : table) {
      if (key == "match") {
        patterns(node, group);
      } else if (key == "lr_scale") {
        if (const auto entry = group_value(scale, node)) group.lr_scale = std::get<double>(entry->value);
      } else if (const ConfigKey* own = plugin_key(key.str()); own && own->per_group) {
        if (auto entry = group_value(*own, node)) group.own.push_back(std::move(*entry));
      } else {
        no_group_key(key_origin(key, node), std::string(key.str()), own);
      }
    }
    if (!table.contains("match"))
      problem(group.origin,
              "missing key 'match' in [[optimizer.groups]]: name patterns such as [\"*.bias\", \"norm*\"]");
    for (const Entry& entry : config_.entries_) {
      if (!is_plugin_key(entry.key)) continue;
      const auto own = std::find_if(group.own.begin(), group.own.end(),
                                    [&](const Entry& e) { return e.key.name == entry.key.name; });
      group.values.push_back(own == group.own.end() ? entry : *own);
    }
    config_.groups_.push_back(std::move(group));
  }

  void checkpoints() {
    if (!config_.text("checkpoint.dir").empty()) return;
    const auto lacks = [&](const std::string& path, const std::string& what) {
      problem(entry(path).origin,
              path + ": " + what + " needs a folder, but checkpoint.dir is empty; set checkpoint.dir");
    };
    if (config_.integer("checkpoint.every") > 0) lacks("checkpoint.every", "writing checkpoints");
    if (config_.boolean("checkpoint.resume")) lacks("checkpoint.resume", "loading the newest checkpoint");
    if (config_.text("checkpoint.on_signal") == "save") lacks("checkpoint.on_signal", "saving a checkpoint");
  }

  void renames() {
    const toml::node* node = node_at(tree_.root, "checkpoint.rename");
    if (!node) return;
    if (!node->is_table())
      return problem(origin_of(node->source()),
                     "checkpoint.rename: expected a table; write [checkpoint.rename] and " +
                         std::string("below it \"name in the model\" = \"name in the file\""));
    for (const auto& [key, value] : *node->as_table()) {
      const auto* theirs = value.as_string();
      const std::string ours(key.str());
      const auto stars = [](const std::string& text) { return std::count(text.begin(), text.end(), '*'); };
      if (!theirs)
        problem(key_origin(key, value), "checkpoint.rename: '" + ours + "': expected a string, the name in the file");
      else if (stars(ours) < stars(theirs->get()))
        problem(key_origin(key, value), "checkpoint.rename: '" + ours + "': '" + theirs->get() +
                                            "' has more `*` than '" + ours +
                                            "'; each `*` on the right needs one on the left");
      else
        config_.renames_.push_back({ours, theirs->get(), key_origin(key, value)});
    }
    // Exact names come before patterns, longer patterns before shorter ones.
    const auto rank = [](const Rename& r) { return std::pair(r.ours.find('*') != r.ours.npos, -std::ssize(r.ours)); };
    std::stable_sort(config_.renames_.begin(), config_.renames_.end(),
                     [&](const Rename& a, const Rename& b) { return rank(a) < rank(b); });
  }

  // True for keys of the chosen optimizer, the only one whose keys are loaded.
  static bool is_plugin_key(const ConfigKey& key) { return key.table.rfind("optimizer.", 0) == 0; }

  const ConfigKey* plugin_key(std::string_view name) const {
    for (const ConfigKey& key : keys_)
      if (key.name == name && is_plugin_key(key)) return &key;
    return nullptr;
  }

  void no_group_key(const Origin& origin, const std::string& name, const ConfigKey* own) {
    if (own) return problem(origin, "'" + name + "' cannot differ between groups; write it in [" + own->table + "]");
    std::vector<std::string> there{"match", "lr_scale"};
    for (const ConfigKey& key : keys_)
      if (key.per_group) there.push_back(key.name);
    const auto near = all_nearest(name, there);
    std::string all;
    for (const auto& one : there) all += (all.empty() ? "; a group accepts " : ", ") + one;
    problem(origin, "unknown key '" + name + "' in [[optimizer.groups]]" + (near.empty() ? all : did_you_mean(near)));
  }

  std::optional<Entry> group_value(const ConfigKey& key, const toml::node& node) {
    ParsedValue got = parse_value(key, node, nullptr);
    const Origin origin = origin_of(node.source());
    if (got.problem.empty()) return Entry{key, std::move(got.value), std::move(got.written), origin};
    problem(origin, "optimizer.groups: " + key.name + ": " + got.problem);
    return {};
  }

  void patterns(const toml::node& node, GroupConfig& group) {
    if (const auto* text = node.as_string()) group.match.push_back(text->get());
    if (const auto* list = node.as_array())
      for (const auto& one : *list)
        if (const auto* text = one.as_string()) group.match.push_back(text->get());
    const std::size_t given = node.is_array() ? node.as_array()->size() : 1;
    if (group.match.empty() || group.match.size() != given)
      problem(origin_of(node.source()),
              "optimizer.groups: match: expected name patterns such as [\"*.bias\", \"norm*\"]");
  }

  const Document::Tree& tree_;
  const PluginIds& unread_;
  std::vector<UncheckedValue>* const unchecked_;
  std::vector<ConfigKey> keys_;
  std::map<std::string, std::string> chosen_;
  std::set<std::string> paths_, tables_;
  std::vector<Problem> problems_;
  std::size_t more_problems_ = 0;
  JobConfig config_;
  int64_t world_ = 1;
};

JobConfig Document::check(const std::vector<ConfigKey>& more, int world, const PluginIds& unread,
                          std::vector<UncheckedValue>* unchecked) const {
  return Check(*tree_, *this, more, unread, unchecked).run(world);
}

}  // namespace zr::host
