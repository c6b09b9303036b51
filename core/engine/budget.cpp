#include "engine/budget.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace zr::host {

namespace {
constexpr std::size_t kShown = 3;
constexpr int kMostRanks = 1024;  // that one launcher starts

Edit set(const std::string& path, const std::string& value) { return {{path + "=" + value}, 0, 1, 0}; }
Edit set(const std::string& path, int64_t value) { return set(path, std::to_string(value)); }

Edit together(Edit edit, const Edit& with) {
  edit.overrides.insert(edit.overrides.end(), with.overrides.begin(), with.overrides.end());
  edit.ranks = std::max(edit.ranks, with.ranks);
  edit.activations *= with.activations;
  return edit;
}

// A size as a file would have it, in the largest unit that divides it.
std::string size_text(int64_t bytes) {
  const char* unit = "B";
  for (const char* larger : {"KiB", "MiB", "GiB"}) {
    if (bytes % 1024) break;
    bytes /= 1024;
    unit = larger;
  }
  return std::to_string(bytes) + unit;
}

// They set no key twice, and no size of a strategy that is not chosen any more.
bool agree(const Edit& one, const Edit& two) {
  for (const std::string& a : one.overrides)
    for (const std::string& b : two.overrides) {
      const std::string path = a.substr(0, a.find('=')), other = b.substr(0, b.find('='));
      if (path == other || other.rfind(path + ".", 0) == 0) return false;
    }
  return true;
}

// Edits of one kind; two of different kinds can be made together.
using Kinds = std::vector<std::vector<Edit>>;

std::vector<Edit> other_strategies(const JudgedJob& job) {
  std::vector<Edit> edits;
  for (const std::string& id : job.strategies)
    if (id != job.strategy.table->id) edits.push_back(set("strategy", id));
  return edits;
}

// What [offload] leaves on the device, on a tier.
std::vector<Edit> on_tiers(const JudgedJob& job, const std::string& path) {
  std::vector<Edit> edits;
  if (job.config.text(path) == kOnDevice)
    for (const std::string& id : job.tier_ids) edits.push_back(set(path, id));
  return edits;
}

// More ranks for the same samples a step.
std::vector<Edit> more_ranks(const Config& config, int ranks) {
  std::vector<Edit> edits;
  const int64_t times = config.integer("train.gradient_accumulation"), micro = config.integer("train.micro_batch");
  for (const int factor : {2, 4, 8}) {
    if (ranks * factor > kMostRanks) break;
    Edit edit = set("job.ranks", ranks * factor);
    edit.ranks = ranks * factor;
    if (times % factor == 0) {
      edit = together(edit, set("train.gradient_accumulation", times / factor));
    } else if (micro % factor == 0) {
      edit = together(edit, set("train.micro_batch", micro / factor));
      edit.activations = 1.0 / factor;
    } else {
      break;
    }
    edits.push_back(edit);
  }
  return edits;
}

// Smaller micro-batches, more of them.
std::vector<Edit> smaller_micro_batches(const Config& config) {
  std::vector<Edit> edits;
  const int64_t times = config.integer("train.gradient_accumulation"), micro = config.integer("train.micro_batch");
  for (int64_t factor = 2; micro % factor == 0; factor *= 2) {
    Edit edit = together(set("train.micro_batch", micro / factor), set("train.gradient_accumulation", times * factor));
    edit.activations = 1.0 / static_cast<double>(factor);
    edits.push_back(edit);
  }
  return edits;
}

// The strategy's sizes, an eighth of what they are.
std::vector<Edit> smaller_sizes(const JudgedJob& job) {
  std::vector<Edit> edits;
  for (const Entry* entry : job.config.table(std::string("strategy.") + job.strategy.table->id)) {
    if (entry->key.type != ZR_KEY_BYTES) continue;
    const int64_t now = std::get<int64_t>(entry->value),
                  least = std::isfinite(entry->key.min) ? static_cast<int64_t>(entry->key.min) : 0;
    if (const int64_t smaller = std::max(now / 8, least); smaller < now)
      edits.push_back(set(entry->key.path(), size_text(smaller)));
  }
  return edits;
}

Kinds all_edits(const JudgedJob& job, int ranks, bool activations) {
  Kinds kinds{other_strategies(job), more_ranks(job.config, ranks)};
  if (activations) kinds.push_back(smaller_micro_batches(job.config));
  if (job.config.text("gradients.dtype") == "fp32") kinds.push_back({set("gradients.dtype", "bf16")});
  kinds.push_back(smaller_sizes(job));
  kinds.push_back(on_tiers(job, "offload.optimizer"));
  kinds.push_back(on_tiers(job, "offload.gradients"));
  return kinds;
}
}  // namespace

std::vector<Edit> edits_that_fit(const JudgedJob& job, int ranks, const Overdraft& over, const Need& need) {
  const Kinds kinds = all_edits(job, ranks, over.activations > 0);
  std::vector<Edit> fitting;
  const auto fits = [&](Edit edit) {
    if (edit.ranks == 0) edit.ranks = ranks;
    const auto plan = need(edit);
    if (!plan) return false;
    edit.bytes = *plan + static_cast<int64_t>(static_cast<double>(over.activations) * edit.activations);
    if (edit.bytes <= over.budget) fitting.push_back(edit);
    return edit.bytes <= over.budget;
  };
  const auto best_first = [&](std::size_t from) {
    std::stable_sort(fitting.begin() + static_cast<std::ptrdiff_t>(from), fitting.end(),
                     [](const Edit& a, const Edit& b) { return a.bytes < b.bytes; });
    if (fitting.size() > kShown) fitting.resize(kShown);
  };
  Kinds short_of_it(kinds.size());
  for (std::size_t k = 0; k < kinds.size(); ++k)
    for (const Edit& edit : kinds[k])
      if (!fits(edit)) short_of_it[k].push_back(edit);
  best_first(0);
  const std::size_t alone = fitting.size();
  if (alone == kShown) return fitting;
  for (std::size_t k = 0; k < kinds.size(); ++k)
    for (std::size_t other = k + 1; other < kinds.size(); ++other)
      for (const Edit& one : short_of_it[k])
        for (const Edit& two : short_of_it[other])
          if (agree(one, two)) fits(together(one, two));
  best_first(alone);
  return fitting;
}

std::string text_of(const std::vector<Edit>& edits, const Overdraft& over) {
  if (edits.empty())
    return "no edit of strategy, ranks, micro-batch or sizes makes it fit: raise the budget, or train a smaller model";
  std::string text = "with any of these lines it fits:";
  for (const Edit& edit : edits) {
    std::string line;
    for (const std::string& override_with : edit.overrides) {
      const auto at = override_with.find('=');
      const std::string value = override_with.substr(at + 1);
      const bool number = value.find_first_not_of("0123456789") == value.npos;
      line += (line.empty() ? "" : ", ") + override_with.substr(0, at) + " = " + (number ? value : '"' + value + '"');
    }
    text += "\n  " + line + std::string(line.size() < 48 ? 48 - line.size() : 1, ' ') + "saves " +
            bytes_text(over.bytes() - edit.bytes) + ", " + bytes_text(edit.bytes) + " are needed";
  }
  return text;
}

}  // namespace zr::host
