#include "config/deepspeed_schedule.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.hpp"
#include "config/document_tree.hpp"

namespace zr::host::config {

namespace {

template <class T>
T value_at(const toml::table& root, const std::string& path, T otherwise) {
  const toml::node* node = node_at(root, path);
  return node ? node->value<T>().value_or(otherwise) : otherwise;
}

// DeepSpeed's counter is one behind the index of the update, and its warm-up takes at least 2 steps. Its cosine begins
// one step before the warm-up ends.
std::string same_rates(const toml::table& root, const std::string& name) {
  const std::string table = "schedule." + name + ".";
  const int64_t warm = std::max<int64_t>(2, value_at<int64_t>(root, table + "warmup_num_steps", 1000));
  const int64_t steps = value_at<int64_t>(root, "train.steps", 100);
  const int64_t end = value_at<int64_t>(root, table + "total_num_steps", steps);
  const double rate = value_at(root, "optimizer.lr", 1e-3), full = value_at(root, table + "warmup_max_lr", rate);
  const double least = value_at(root, table + "warmup_min_lr", 0.0);
  const bool cosine = name == "WarmupCosineLR", decays = name != "WarmupLR";
  const double start = cosine                  ? value_at(root, table + "warmup_min_ratio", 0.0)
                       : least > 0 && full > 0 ? least / full
                                               : 0.0;
  const std::string now = cosine ? "cosine" : decays ? "linear" : "constant";
  std::string keys = fmt::format("warmup = {}, warmup_from = 1, warmup_type = {}", warm + 1,
                                 toml_quoted(value_at<std::string>(root, table + "warmup_type", "log")));
  if (start > 0) keys += ", start_ratio = " + shortest(start);
  if (cosine) keys += fmt::format(", decay_from = {}", warm);
  if (decays) keys += fmt::format(", decay_until = {}", cosine ? end : end + 1);
  const double last = cosine ? value_at(root, table + "cos_min_ratio", 1e-4) : start;
  if (decays && last > 0) keys += ", final_ratio = " + shortest(last);
  const std::string lr = full == rate ? "" : fmt::format(", and lr = {} in [optimizer]", shortest(full));
  return fmt::format("write use = \"{0}\" in [schedule] and {1} in [schedule.{0}]{2}", now, keys, lr);
}

bool is_deepspeed(const std::string& name) {
  return name == "WarmupLR" || name == "WarmupDecayLR" || name == "WarmupCosineLR";
}

}  // namespace

std::optional<std::string> deepspeed_schedule_problem(const toml::table& root, const std::string& path) {
  const std::string use = value_at<std::string>(root, "schedule.use", "");
  const bool selects = path == "schedule.use";
  const std::string name = selects ? use : path.substr(path.find('.') + 1);
  if (!path.starts_with("schedule.") || !is_deepspeed(name)) return {};
  if (!selects && use == name) return "";
  return fmt::format("{}: {} is DeepSpeed's name; for the same rates {}", path, toml_quoted(name),
                     same_rates(root, name));
}

}  // namespace zr::host::config
