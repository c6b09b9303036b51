#include "job/budget_suggestions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace zr::host::job {

namespace {
constexpr std::size_t kShown = 3;
constexpr int kMaxRanks = 1024;  // that one launcher can start

Suggestion set(const std::string& path, const std::string& value) { return {{path + "=" + value}, 0, 1, 0}; }
Suggestion set(const std::string& path, int64_t value) { return set(path, std::to_string(value)); }

Suggestion combined(Suggestion suggestion, const Suggestion& with) {
  suggestion.overrides.insert(suggestion.overrides.end(), with.overrides.begin(), with.overrides.end());
  suggestion.ranks = std::max(suggestion.ranks, with.ranks);
  suggestion.activations *= with.activations;
  return suggestion;
}

// A size as TOML text, in the largest unit that divides it.
std::string size_text(int64_t bytes) {
  const char* unit = "B";
  for (const char* larger : {"KiB", "MiB", "GiB"}) {
    if (bytes % 1024) break;
    bytes /= 1024;
    unit = larger;
  }
  return fmt::format("{}{}", bytes, unit);
}

// True if the two set different keys, and neither sets a key of the strategy that the other replaces.
bool compatible(const Suggestion& suggestion, const Suggestion& other_suggestion) {
  for (const std::string& a : suggestion.overrides)
    for (const std::string& b : other_suggestion.overrides) {
      const std::string path = a.substr(0, a.find('=')), other = b.substr(0, b.find('='));
      if (path == other || other.rfind(path + ".", 0) == 0) return false;
    }
  return true;
}

// Suggestions grouped by kind; two of different kinds can be combined.
using Kinds = std::vector<std::vector<Suggestion>>;

std::vector<Suggestion> other_strategies(const plugin::ResolvedJob& job) {
  std::vector<Suggestion> suggestions;
  for (const std::string& id : job.strategies)
    if (id != job.strategy.table->id) suggestions.push_back(set("strategy", id));
  return suggestions;
}

// Moves the state that this key of [offload] keeps on the device to a tier.
std::vector<Suggestion> on_tiers(const plugin::ResolvedJob& job, const config::Setting<config::TierChoice>& choice) {
  std::vector<Suggestion> suggestions;
  if (choice->on_device())
    for (const std::string& id : job.tier_ids) suggestions.push_back(set(choice.key, id));
  return suggestions;
}

// More ranks with the same number of samples per step.
std::vector<Suggestion> more_ranks(const config::JobConfig& config, int ranks) {
  std::vector<Suggestion> suggestions;
  const int64_t times = config.train().gradient_accumulation, micro = config.train().micro_batch;
  for (const int factor : {2, 4, 8}) {
    if (ranks * factor > kMaxRanks) break;
    Suggestion suggestion = set("job.ranks", ranks * factor);
    suggestion.ranks = ranks * factor;
    if (times % factor == 0) {
      suggestion = combined(suggestion, set("train.gradient_accumulation", times / factor));
    } else if (micro % factor == 0) {
      suggestion = combined(suggestion, set("train.micro_batch", micro / factor));
      suggestion.activations = 1.0 / factor;
    } else {
      break;
    }
    suggestions.push_back(suggestion);
  }
  return suggestions;
}

// Smaller micro-batches, with more gradient accumulation.
std::vector<Suggestion> smaller_micro_batches(const config::JobConfig& config) {
  std::vector<Suggestion> suggestions;
  const int64_t times = config.train().gradient_accumulation, micro = config.train().micro_batch;
  for (int64_t factor = 2; micro % factor == 0; factor *= 2) {
    Suggestion suggestion =
        combined(set("train.micro_batch", micro / factor), set("train.gradient_accumulation", times * factor));
    suggestion.activations = 1.0 / static_cast<double>(factor);
    suggestions.push_back(suggestion);
  }
  return suggestions;
}

// Each byte-size key of the strategy, reduced to an eighth.
std::vector<Suggestion> smaller_sizes(const plugin::ResolvedJob& job) {
  std::vector<Suggestion> suggestions;
  for (const config::Entry* entry : job.config.table(std::string("strategy.") + job.strategy.table->id)) {
    if (entry->key.type != ZR_KEY_BYTES) continue;
    const int64_t now = std::get<int64_t>(entry->value),
                  minimum = std::isfinite(entry->key.min) ? static_cast<int64_t>(entry->key.min) : 0;
    if (const int64_t smaller = std::max(now / 8, minimum); smaller < now)
      suggestions.push_back(set(entry->key.path(), size_text(smaller)));
  }
  return suggestions;
}

Kinds all_suggestions(const plugin::ResolvedJob& job, int ranks, bool activations) {
  Kinds kinds{other_strategies(job), more_ranks(job.config, ranks)};
  if (activations) kinds.push_back(smaller_micro_batches(job.config));
  if (job.config.gradients().dtype == ZR_F32) kinds.push_back({set("gradients.dtype", "bf16")});
  kinds.push_back(smaller_sizes(job));
  kinds.push_back(on_tiers(job, job.config.offload().optimizer));
  kinds.push_back(on_tiers(job, job.config.offload().gradients));
  return kinds;
}

// Moves the state that this key of [offload] keeps on a tier to the device or to another tier.
std::vector<Suggestion> off_the_tier(const plugin::ResolvedJob& job,
                                     const config::Setting<config::TierChoice>& choice) {
  std::vector<Suggestion> suggestions;
  if (choice->on_device()) return suggestions;
  suggestions.push_back(set(choice.key, config::kOnDevice));
  for (const std::string& id : job.tier_ids)
    if (id != choice->text) suggestions.push_back(set(choice.key, id));
  return suggestions;
}

Kinds all_host_suggestions(const plugin::ResolvedJob& job) {
  const config::OffloadConfig& offload = job.config.offload();
  Kinds kinds{other_strategies(job), smaller_sizes(job), off_the_tier(job, offload.optimizer),
              off_the_tier(job, offload.gradients), off_the_tier(job, offload.parameters)};
  const auto change = [&](const std::string& key, const std::string& value) { kinds.push_back({set(key, value)}); };
  if (const auto& async = job.config.checkpoint().async; async) change(async.key, "false");
  if (offload.overlap) change(offload.overlap.key, "false");
  return kinds;
}

// The suggestions with which the job fits.
class FittingSuggestions {
 public:
  FittingSuggestions(int ranks, const BudgetShortfall& shortfall, const RequiredBytes& required_bytes)
      : ranks_(ranks), shortfall_(shortfall), required_bytes_(required_bytes) {}

  // Adds the suggestion if the job fits with it. Returns whether it does.
  bool add(Suggestion suggestion) {
    if (suggestion.ranks == 0) suggestion.ranks = ranks_;
    const auto plan = required_bytes_(suggestion);
    if (!plan) return false;
    suggestion.bytes =
        *plan + static_cast<int64_t>(static_cast<double>(shortfall_.activations) * suggestion.activations);
    if (suggestion.bytes > shortfall_.budget) return false;
    fitting_.push_back(suggestion);
    return true;
  }

  // Sorts the suggestions from index `first` on by the bytes that they need, and keeps the first kShown of all.
  void keep_best(std::size_t first) {
    std::stable_sort(fitting_.begin() + static_cast<std::ptrdiff_t>(first), fitting_.end(),
                     [](const Suggestion& a, const Suggestion& b) { return a.bytes < b.bytes; });
    if (fitting_.size() > kShown) fitting_.resize(kShown);
  }

  const std::vector<Suggestion>& list() const { return fitting_; }

 private:
  const int ranks_;
  const BudgetShortfall& shortfall_;
  const RequiredBytes& required_bytes_;
  std::vector<Suggestion> fitting_;
};

// Adds single suggestions. Returns those with which the job does not fit.
Kinds add_single(const Kinds& kinds, FittingSuggestions& fitting) {
  Kinds too_large(kinds.size());
  for (std::size_t k = 0; k < kinds.size(); ++k)
    for (const Suggestion& suggestion : kinds[k])
      if (!fitting.add(suggestion)) too_large[k].push_back(suggestion);
  return too_large;
}

// Adds the combinations of two compatible suggestions of different kinds.
void add_pairs(const Kinds& kinds, FittingSuggestions& fitting) {
  for (std::size_t k = 0; k < kinds.size(); ++k)
    for (std::size_t other = k + 1; other < kinds.size(); ++other)
      for (const Suggestion& first : kinds[k])
        for (const Suggestion& second : kinds[other])
          if (compatible(first, second)) fitting.add(combined(first, second));
}

std::vector<Suggestion> fitting_of(const Kinds& kinds, int ranks, const BudgetShortfall& shortfall,
                                   const RequiredBytes& required_bytes) {
  FittingSuggestions fitting(ranks, shortfall, required_bytes);
  const Kinds too_large = add_single(kinds, fitting);
  fitting.keep_best(0);
  const std::size_t singles = fitting.list().size();
  if (singles == kShown) return fitting.list();
  add_pairs(too_large, fitting);
  fitting.keep_best(singles);
  return fitting.list();
}
}  // namespace

std::vector<Suggestion> fitting_suggestions(const plugin::ResolvedJob& job, int ranks, const BudgetShortfall& shortfall,
                                            const RequiredBytes& required_bytes) {
  return fitting_of(all_suggestions(job, ranks, shortfall.activations > 0), ranks, shortfall, required_bytes);
}

std::vector<Suggestion> fitting_host_suggestions(const plugin::ResolvedJob& job, int ranks,
                                                 const BudgetShortfall& shortfall,
                                                 const RequiredBytes& required_bytes) {
  return fitting_of(all_host_suggestions(job), ranks, shortfall, required_bytes);
}

std::string text_of(const std::vector<Suggestion>& suggestions, const BudgetShortfall& shortfall) {
  if (suggestions.empty())
    return "no change of strategy, ranks, micro-batch or sizes makes the job fit; raise the budget, or train a smaller "
           "model";
  std::string text = "the job fits with any one of these lines:";
  for (const Suggestion& suggestion : suggestions) {
    std::string line;
    for (const std::string& override_with : suggestion.overrides) {
      const auto at = override_with.find('=');
      const std::string value = override_with.substr(at + 1);
      const bool bare = value == "true" || value == "false" || value.find_first_not_of("0123456789") == value.npos;
      line += fmt::format("{}{} = {}", line.empty() ? "" : ", ", override_with.substr(0, at),
                          bare ? value : fmt::format("\"{}\"", value));
    }
    text += fmt::format("\n  {}{}saves {}, needs {}", line, std::string(line.size() < 48 ? 48 - line.size() : 1, ' '),
                        bytes_text(shortfall.bytes() - suggestion.bytes), bytes_text(suggestion.bytes));
  }
  return text;
}

}  // namespace zr::host::job
