#include "config/deepspeed_schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/limits.hpp"
#include "base/text.hpp"
#include "config/document_tree.hpp"

namespace zr::host::config {

namespace {

bool is_deepspeed(const std::string& name) {
  return name == "WarmupLR" || name == "WarmupDecayLR" || name == "WarmupCosineLR";
}

// DeepSpeed's keys of a schedule.
std::vector<ConfigKey> keys_of_schedule(const std::string& name) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::string table = "schedule." + name;
  const auto rate = [&](const char* key, double max) {
    return ConfigKey{table, key, ZR_KEY_FLOAT, "0.0", "rate or fraction", 0, max};
  };
  const auto steps = [&](const char* key, double min) {
    return ConfigKey{table, key, ZR_KEY_INT, "1000", "steps", min, double(kMaxSteps - 1)};
  };
  std::vector<ConfigKey> keys{steps("warmup_num_steps", 0), steps("last_batch_iteration", -1)};
  keys.push_back({table, "warmup_type", ZR_KEY_STRING, "\"log\"", "shape"});
  keys.back().choices = {"log", "linear"};
  if (name != "WarmupLR") keys.push_back(steps("total_num_steps", 1));
  if (name == "WarmupCosineLR") {
    keys.push_back(rate("warmup_min_ratio", 1));
    keys.push_back(rate("cos_min_ratio", 1));
  } else {
    keys.push_back(rate("warmup_min_lr", kInf));
    keys.push_back(rate("warmup_max_lr", kInf));
  }
  return keys;
}

// The values of a table that a file has; a problem with one of them, or "".
struct Given {
  std::map<std::string, ParsedValue> values;
  std::string problem;

  Given(const toml::table& root, const std::string& name) {
    const std::string table = "schedule." + name;
    const std::vector<ConfigKey> keys = keys_of_schedule(name);
    const toml::node* node = node_at(root, table);
    if (!node || !node->is_table()) return;
    for (const auto& [key, value] : *node->as_table()) {
      const std::string path = table + "." + std::string(key.str());
      const auto known =
          std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& one) { return one.path() == path; });
      if (known == keys.end()) {
        problem = fmt::format("{} is not a key of DeepSpeed's schedule", path);
        return;
      }
      ParsedValue parsed = parse_value(*known, value, nullptr);
      if (!parsed.problem.empty()) {
        problem = fmt::format("{}: {}", path, parsed.problem);
        return;
      }
      values[known->name] = std::move(parsed);
    }
  }
  template <class T>
  T get(const char* key, const T& otherwise) const {
    const auto at = values.find(key);
    return at == values.end() ? otherwise : std::get<T>(at->second.value);
  }
};

// A value of the engine's keys in a file, before they are checked.
template <class T>
T value_at(const toml::table& root, const char* path, const T& otherwise) {
  const toml::node* node = node_at(root, path);
  return node ? node->value<T>().value_or(otherwise) : otherwise;
}

// As in DeepSpeed 0.19.8: its counter is one behind the index of the update, and its warm-up takes at least 2 steps.
// Its cosine begins one step before the warm-up ends. The full rate of WarmupLR is by default that of the optimizer.
std::string remedy(const toml::table& root, const std::string& name) {
  const Given given(root, name);
  if (!given.problem.empty()) return "; " + given.problem;
  if (given.get<int64_t>("last_batch_iteration", -1) != -1)
    return "; last_batch_iteration has no counterpart, because a resumed job continues its schedule: remove it";
  const bool cosine = name == "WarmupCosineLR", decays = name != "WarmupLR";
  const int64_t warm = std::max<int64_t>(2, given.get<int64_t>("warmup_num_steps", 1000));
  const int64_t steps = std::clamp<int64_t>(value_at<int64_t>(root, "train.steps", 100), 1, kMaxSteps - 1);
  const int64_t end = given.get("total_num_steps", steps);
  const double rate = value_at(root, "optimizer.lr", 1e-3);
  const double full = cosine ? rate : given.get("warmup_max_lr", decays ? 1e-3 : rate);
  const double least = given.get("warmup_min_lr", 0.0);
  if (least > full)
    return "; a rate that falls during the warm-up has no counterpart: pass a function to engine.set_schedule()";
  const double start = cosine ? given.get("warmup_min_ratio", 0.0) : full > 0 ? least / full : 0;
  const double last = cosine ? given.get("cos_min_ratio", 1e-4) : start;
  const std::string now = cosine ? "cosine" : decays ? "linear" : "constant";
  std::string keys = fmt::format("warmup = {}, warmup_from = 1, warmup_type = {}", warm + 1,
                                 toml_quoted(given.get<std::string>("warmup_type", "log")));
  if (start > 0) keys += ", start_ratio = " + shortest(start);
  if (cosine) keys += fmt::format(", decay_from = {}", std::min(warm, end));
  if (decays) keys += fmt::format(", decay_until = {}", cosine ? end : end + 1);
  if (decays && last > 0) keys += ", final_ratio = " + shortest(last);
  const std::string lr = full == rate ? "" : fmt::format(", and lr = {} in [optimizer]", shortest(full));
  std::string differs;
  if (cosine && start > 0) differs = "; only the first update differs: its rate is 0 in DeepSpeed";
  if (!decays && !given.values.contains("warmup_max_lr"))
    differs =
        "; without warmup_max_lr the full rate is optimizer.lr, as in DeepSpeed 0.19.8; in older versions it is 0.001";
  return fmt::format("; for the same rates write use = \"{0}\" in [schedule] and {1} in [schedule.{0}]{2}{3}", now,
                     keys, lr, differs);
}

}  // namespace

std::optional<std::string> deepspeed_schedule_problem(const toml::table& root, const std::string& path) {
  const std::string use = value_at<std::string>(root, "schedule.use", "");
  const bool selects = path == "schedule.use";
  const std::string name = selects ? use : path.substr(path.find('.') + 1);
  if (!path.starts_with("schedule.") || !is_deepspeed(name)) return {};
  if (!selects && use == name) return "";
  return fmt::format("{}: {} is DeepSpeed's name{}", path, toml_quoted(name),
                     selects ? remedy(root, name) : ", and schedule.use does not select it; remove the table");
}

}  // namespace zr::host::config
