#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "config/batch.hpp"
#include "config/config.hpp"
#include "config/deepspeed_schedule.hpp"
#include "config/document_tree.hpp"
#include "config/groups.hpp"
#include "config/key_reader.hpp"
#include "config/names.hpp"
#include "config/path_value.hpp"
#include "config/precision.hpp"
#include "config/problems.hpp"

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
  Check(const Document::Tree& tree, const Document& document, const std::vector<ConfigKey>& extra_keys,
        const PluginIds& not_loaded, std::vector<UncheckedValue>* unchecked,
        const std::vector<UnselectedPlugin>& unselected)
      : tree_(tree),
        keys_(host_keys()),
        document_(document),
        unselected_(unselected),
        chosen_(chosen_plugins(document)),
        problems_(tree.file),
        names_(tree, chosen_, not_loaded, unchecked, problems_) {
    keys_.insert(keys_.end(), extra_keys.begin(), extra_keys.end());
    for (const ConfigKey& key : keys_) names_.declare(key);
    for (const UnselectedPlugin& plugin : unselected_) {
      if (!plugin.problem.empty()) continue;
      names_.declare_table(plugin.role, plugin.id);
      for (const ConfigKey& key : plugin.keys) names_.declare(key);
    }
  }

  JobConfig run(int world) {
    names_.check();
    for (const ConfigKey& key : keys_) value(key);
    for (const UnselectedPlugin& plugin : unselected_) check_unselected(plugin);
    config_.groups_ = read_groups(tree_.root, keys_, config_.entries_, problems_);
    config_.renames_ = read_renames(tree_.root, problems_);
    problems_.throw_if_any();
    keep_chosen_schedule();
    references();
    ranks(world);
    run_name();
    batch();
    config_.host_ = read_host_config(config_);
    for (const PrecisionProblem& wrong : precision_problems(config_.host_)) problem(wrong.origin, wrong.text);
    checkpoints();
    schedule();
    device();
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
      if (const auto renamed = deepspeed_schedule_problem(tree_.root, path)) return problem(entry.origin, *renamed);
      if (!got.problem.empty()) return problem(entry.origin, fmt::format("{}: {}", path, got.problem));
      entry.value = std::move(got.value);
      entry.written = std::move(got.written);
      if (const std::string wrong = resolve_path_value(entry, tree_.folder); !wrong.empty())
        return problem(entry.origin, fmt::format("{}: {}", path, wrong));
    } else if (key.def.empty()) {
      return missing(key);
    } else if (key.def[0] != '@') {
      ParsedValue standard = default_value(key);
      entry.value = std::move(standard.value);
      entry.written = std::move(standard.written);
      resolve_path_value(entry, tree_.folder);
    }
    config_.entries_.push_back(std::move(entry));
  }

  // Validates the values for the keys of a plug-in that is not selected.
  void check_unselected(const UnselectedPlugin& plugin) {
    if (!plugin.problem.empty()) {
      config_.warnings_.push_back(
          fmt::format("{}; values in [{}.{}] were not checked", plugin.problem, plugin.role, plugin.id));
      return;
    }
    std::vector<GivenValue> given;
    for (const ConfigKey& key : plugin.keys) {
      const std::string path = key.path();
      const toml::node* node = node_at(tree_.root, path);
      if (!node) continue;
      const auto raw = tree_.overrides.find(path);
      const ParsedValue got = parse_value(key, *node, raw == tree_.overrides.end() ? nullptr : &raw->second);
      given.push_back({path, origin_of(node->source())});
      if (!got.problem.empty()) problem(given.back().origin, fmt::format("{}: {}", path, got.problem));
    }
    if (plugin.role == "offload") {
      const std::vector<Setting<TierChoice>> choices = document_.tier_choices();
      const auto chosen =
          std::any_of(choices.begin(), choices.end(), [](const auto& choice) { return choice.given(); });
      return warn_of_no_effect(given, chosen,
                               fmt::format("no key of [offload] selects the tier {}; to use the tier, name it in "
                                           "offload.optimizer or another of these keys",
                                           toml_quoted(plugin.id)));
    }
    Origin origin;
    const std::string id = document_.chosen(plugin.role, &origin);
    warn_of_no_effect(given, origin.given(),
                      fmt::format("{}; to use the table, set {} = {}", selected_text(plugin.role, id, origin),
                                  plugin.role, toml_quoted(plugin.id)));
  }

  std::string selected_text(const std::string& role, const std::string& id, const Origin& origin) const {
    if (role == "communicator" && document_.chooses_communicator())
      return fmt::format("{} = \"auto\" ({}) has selected {}", role, origin.text(), toml_quoted(id));
    return fmt::format("{} = {} ({}) is selected", role, toml_quoted(id), origin.text());
  }

  struct GivenValue {
    std::string path;
    Origin origin;
  };

  // Adds a warning about the values of a table, unless they are in a file that selects another table explicitly.
  void warn_of_no_effect(const std::vector<GivenValue>& table, bool other_selected, const std::string& reason) {
    std::vector<std::string> paths;
    Origin first;
    for (const GivenValue& value : table) {
      if (other_selected && value.origin.from == Origin::From::file) continue;
      if (paths.empty()) first = value.origin;
      paths.push_back(value.path);
    }
    if (!paths.empty())
      config_.warnings_.push_back(fmt::format("{}: {} {} no effect, because {}", first.text(), fmt::join(paths, ", "),
                                              paths.size() == 1 ? "has" : "have", reason));
  }

  void missing(const ConfigKey& key) {
    if (!problems_.empty()) return;  // one of the problems may be this key, misspelt
    const toml::node* table = node_at(tree_.root, key.table);
    problem(table ? origin_of(table->source()) : Origin{},
            fmt::format("missing key '{}' ({}); write it in [{}]", key.path(), key.meaning, key.table));
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
    const Entry& use = KeyReader(config_).entry("schedule.use");
    const std::string keep = "schedule." + std::get<std::string>(use.value);
    std::map<std::string, std::vector<GivenValue>> unselected;
    for (const Entry& entry : config_.entries_)
      if (entry.key.table.starts_with("schedule.") && entry.key.table != keep && entry.origin.given())
        unselected[entry.key.table].push_back({entry.key.path(), entry.origin});
    for (const auto& [table, given] : unselected)
      warn_of_no_effect(given, use.origin.given(),
                        fmt::format("schedule.use = {} ({}) is selected; to use the table, set schedule.use = {}",
                                    use.written, use.origin.text(), toml_quoted(table.substr(table.find('.') + 1))));
    std::erase_if(config_.entries_, [&](const Entry& entry) {
      return entry.key.table.rfind("schedule.", 0) == 0 && entry.key.table != keep;
    });
  }

  Entry& entry(std::string_view path) {
    for (Entry& entry : config_.entries_)
      if (entry.key.path() == path) return entry;
    fail_internal(fmt::format("the key '{}' was not declared", path));
  }

  // The launcher decides the number of ranks; job.ranks is a request to `zeroth train`.
  void ranks(int world) {
    Entry& ranks = entry("job.ranks");
    world_ = std::get<int64_t>(ranks.value);
    if (world <= 0 || world == world_) return;
    world_ = world;
    ranks.value = world_;
    ranks.written = fmt::format("{}", world_);
    ranks.origin = {};
    ranks.origin.from = Origin::From::launcher;
  }

  void run_name() {
    Entry& name = entry("job.name");
    std::string& text = std::get<std::string>(name.value);
    if (text.empty()) text = tree_.run_name;
    if (text.empty()) text = std::filesystem::path(tree_.file).stem().string();
    if (text.empty() || text == "." || text == ".." || text.find('/') != text.npos)
      problem(name.origin, "job.name: expected the name of one folder, found " + toml_quoted(text));
    else if (text.size() > kMaxNameBytes)
      problem(name.origin, fmt::format("job.name: expected a name of at most {} bytes, found one of {}", kMaxNameBytes,
                                       text.size()));
    else if (printable(text) != text)
      problem(name.origin, "job.name: expected a name without control characters, found " + toml_quoted(text));
    name.written = toml_quoted(text);
  }

  void batch() {
    Entry &global = entry("train.global_batch"), &micro = entry("train.micro_batch"),
          &times = entry("train.gradient_accumulation");
    Origin first;
    for (const Entry* entry : {&times, &micro, &global})
      if (entry->origin.from != Origin::From::key_default) first = entry->origin;
    const std::string wrong = derive_batch(global, micro, times, world_);
    if (!wrong.empty()) problem(first, wrong);
  }

  void schedule() {
    const ScheduleConfig& schedule = config_.schedule();
    const auto check_rise = [&](const RiseConfig& of) {
      if (of.warmup_from.given() && of.warmup_from >= of.warmup)
        problem(of.warmup_from.origin, fmt::format("{} = {}: the rise must begin before {} = {}", of.warmup_from.key,
                                                   of.warmup_from.written, of.warmup.key, of.warmup.written));
    };
    check_rise(schedule.constant);
    for (const RiseAndFallConfig* of : {&schedule.linear, &schedule.cosine}) {
      check_rise(*of);
      if (of->decay_from.given() && of->decay_from > of->decay_until)
        problem(of->decay_from.origin,
                fmt::format("{} = {}: the fall must begin by {} = {}", of->decay_from.key, of->decay_from.written,
                            of->decay_until.key, of->decay_until.written));
    }
  }

  void device() {
    const RunConfig& job = config_.job();
    if (job.device->empty()) problem(job.device.origin, "job.device: expected the name of a device, found \"\"");
    if (job.device->starts_with("cpu:"))
      problem(job.device.origin, "job.device: expected \"cpu\" without a number, found " + toml_quoted(job.device));
    const bool on_cpu = job.device.value == kCpuDevice;
    if (!job.device_library->empty() && on_cpu)
      problem(job.device_library.origin,
              "job.device_library is the backend of a device other than the CPU, but job.device is \"cpu\"; set "
              "job.device to the name that the library registers");
  }

  void checkpoints() {
    const CheckpointConfig& checkpoint = config_.checkpoint();
    if (!checkpoint.dir->empty()) return;
    const auto add_missing_folder = [&](const auto& setting, const std::string& what) {
      problem(setting.origin,
              fmt::format("{}: {} needs a folder, but checkpoint.dir is empty; set checkpoint.dir", setting.key, what));
    };
    if (checkpoint.every > 0) add_missing_folder(checkpoint.every, "writing checkpoints");
    if (checkpoint.resume) add_missing_folder(checkpoint.resume, "loading the newest checkpoint");
    if (checkpoint.on_signal == OnSignal::save) add_missing_folder(checkpoint.on_signal, "saving a checkpoint");
  }

  const Document::Tree& tree_;
  std::vector<ConfigKey> keys_;
  const Document& document_;
  const std::vector<UnselectedPlugin>& unselected_;
  const std::map<std::string, std::string> chosen_;
  Problems problems_;
  Names names_;
  JobConfig config_;
  int64_t world_ = 1;
};

JobConfig Document::check(const std::vector<ConfigKey>& extra_keys, int world, const PluginIds& not_loaded,
                          std::vector<UncheckedValue>* unchecked,
                          const std::vector<UnselectedPlugin>& unselected) const {
  return Check(*tree_, *this, extra_keys, not_loaded, unchecked, unselected).run(world);
}

}  // namespace zr::host::config
