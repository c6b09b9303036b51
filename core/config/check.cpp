#include <filesystem>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/batch.hpp"
#include "config/config.hpp"
#include "config/document_tree.hpp"
#include "config/groups.hpp"
#include "config/key_reader.hpp"
#include "config/names.hpp"
#include "config/precision.hpp"
#include "config/problems.hpp"
#include "config/read_host_config.hpp"

namespace zr::host::config {

namespace {

constexpr std::size_t kMaxNameBytes = 200;  // file systems allow 255, and the run folder adds suffixes

std::map<std::string, std::string> chosen_plugins(const Document& document) {
  std::map<std::string, std::string> chosen;
  for (const auto& role : roles()) chosen[role] = document.chosen(role);
  return chosen;
}

}  // namespace

// One run of Document::check: collects all problems of the file before it throws.
class Check {
 public:
  Check(const Document::Tree& tree, const Document& document, const std::vector<ConfigKey>& more,
        const PluginIds& unread, std::vector<UncheckedValue>* unchecked)
      : tree_(tree),
        keys_(host_keys()),
        chosen_(chosen_plugins(document)),
        problems_(tree.file),
        names_(tree, chosen_, unread, unchecked, problems_) {
    keys_.insert(keys_.end(), more.begin(), more.end());
    for (const ConfigKey& key : keys_) names_.declare(key);
  }

  JobConfig run(int world) {
    names_.check();
    for (const ConfigKey& key : keys_) value(key);
    config_.groups_ = read_groups(tree_.root, keys_, config_.entries_, problems_);
    config_.renames_ = read_renames(tree_.root, problems_);
    problems_.throw_if_any();
    keep_chosen_schedule();
    references();
    ranks(world);
    run_name();
    batch();
    config_.host_ = read_host_config(config_);
    for (const PrecisionProblem& one : precision_problems(config_.host_)) problem(one.origin, one.text);
    checkpoints();
    problems_.throw_if_any();
    return std::move(config_);
  }

 private:
  void problem(const Origin& origin, const std::string& text) { problems_.add(origin, text); }

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
      const Entry& other = KeyReader(config_).entry(entry.key.def.substr(1));
      entry.value = other.value;
      entry.written = other.written;
      if (entry.key.type == ZR_KEY_FLOAT) entry.value = KeyReader(config_).number(other.key.path());
    }
  }

  void keep_chosen_schedule() {
    const std::string keep = "schedule." + KeyReader(config_).text("schedule.use");
    std::erase_if(config_.entries_, [&](const Entry& entry) {
      return entry.key.table.rfind("schedule.", 0) == 0 && entry.key.table != keep;
    });
  }

  Entry& entry(std::string_view path) {
    for (Entry& one : config_.entries_)
      if (one.key.path() == path) return one;
    fail_internal("the key '" + std::string(path) + "' was not declared");
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

  void checkpoints() {
    const CheckpointConfig& checkpoint = config_.checkpoint();
    if (!checkpoint.dir->empty()) return;
    const auto lacks = [&](const auto& setting, const std::string& what) {
      problem(setting.origin,
              setting.key + ": " + what + " needs a folder, but checkpoint.dir is empty; set checkpoint.dir");
    };
    if (checkpoint.every > 0) lacks(checkpoint.every, "writing checkpoints");
    if (checkpoint.resume) lacks(checkpoint.resume, "loading the newest checkpoint");
    if (checkpoint.on_signal == OnSignal::save) lacks(checkpoint.on_signal, "saving a checkpoint");
  }

  const Document::Tree& tree_;
  std::vector<ConfigKey> keys_;
  const std::map<std::string, std::string> chosen_;
  Problems problems_;
  Names names_;
  JobConfig config_;
  int64_t world_ = 1;
};

JobConfig Document::check(const std::vector<ConfigKey>& more, int world, const PluginIds& unread,
                          std::vector<UncheckedValue>* unchecked) const {
  return Check(*tree_, *this, more, unread, unchecked).run(world);
}

}  // namespace zr::host::config
