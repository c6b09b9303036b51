// The suggestions for a job that exceeds its memory budget.
#include "job/budget_suggestions.hpp"

#include <gtest/gtest.h>

#include <map>

namespace {

using namespace zr::host;

constexpr zr_component kOwn{sizeof(zr_component),
                            0,
                            "own",
                            "zr.strategy/1",
                            "1",
                            nullptr,
                            nullptr,
                            nullptr,
                            nullptr,
                            nullptr,
                            0,
                            0,
                            nullptr,
                            nullptr,
                            nullptr};

struct Job {
  explicit Job(const std::vector<std::string>& overrides = {}) {
    config::ConfigKey bucket{"strategy.own", "bucket_bytes", ZR_KEY_BYTES, "\"16MiB\"", "of a bucket"};
    bucket.min = 65536;
    std::vector<std::string> all{"strategy=own"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    resolved.config = config::Document::parse("", "job.toml", all).check({bucket}, 0);
    resolved.strategy.table = &kOwn;
    resolved.strategies = {"less", "own", "least"};
  }
  plugin::ResolvedJob resolved;
};

// The bytes for each combination of overrides, as text; other combinations are invalid.
job::RequiredBytes table(const std::map<std::string, int64_t>& bytes) {
  return [bytes](const job::Suggestion& suggestion) -> std::optional<int64_t> {
    std::string text;
    for (const std::string& one : suggestion.overrides) text += (text.empty() ? "" : " ") + one;
    const auto at = bytes.find(text);
    if (at == bytes.end()) return {};
    return at->second;
  };
}
std::vector<std::string> found(const Job& job, int ranks, const job::BudgetShortfall& over,
                               const job::RequiredBytes& need) {
  std::vector<std::string> all;
  for (const job::Suggestion& suggestion : fitting_suggestions(job.resolved, ranks, over, need)) {
    std::string text;
    for (const std::string& one : suggestion.overrides) text += (text.empty() ? "" : " ") + one;
    all.push_back(text + ": " + std::to_string(suggestion.bytes));
  }
  return all;
}
using Texts = std::vector<std::string>;

TEST(BudgetTest, SuggestsThreeEditsThatFitAndSaveMost) {
  const job::RequiredBytes need = table({{"strategy=less", 80},
                                         {"strategy=least", 40},
                                         {"gradients.dtype=bf16", 90},
                                         {"strategy.own.bucket_bytes=2MiB", 70},
                                         {"job.ranks=4 train.gradient_accumulation=4", 120}});
  const Job job({"train.gradient_accumulation=8"});
  EXPECT_EQ(found(job, 2, {95, 130, 0}, need),
            (Texts{"strategy=least: 40", "strategy.own.bucket_bytes=2MiB: 70", "strategy=less: 80"}));
  EXPECT_EQ(found(job, 2, {75, 130, 0}, need), (Texts{"strategy=least: 40", "strategy.own.bucket_bytes=2MiB: 70"}));
  EXPECT_EQ(found(job, 2, {10, 130, 0}, need), Texts{});
}

TEST(BudgetTest, CombinesTwoKeysOnlyWhenOneIsNotEnough) {
  const job::RequiredBytes need = table({{"strategy=less", 80},
                                         {"strategy=least", 60},
                                         {"gradients.dtype=bf16", 90},
                                         {"strategy=less gradients.dtype=bf16", 30},
                                         {"strategy=least gradients.dtype=bf16", 20}});
  EXPECT_EQ(found(Job(), 2, {50, 130, 0}, need),
            (Texts{"strategy=least gradients.dtype=bf16: 20", "strategy=less gradients.dtype=bf16: 30"}));
  EXPECT_EQ(found(Job(), 2, {65, 130, 0}, need),
            (Texts{"strategy=least: 60", "strategy=less gradients.dtype=bf16: 30"}))
      << "an edit that fits alone is not combined";
}

TEST(BudgetTest, ReducesTheMicroBatchAtTheSameSamplesPerStep) {
  const Job job({"train.micro_batch=8", "train.gradient_accumulation=1"});
  const job::RequiredBytes need = [](const job::Suggestion&) { return std::optional<int64_t>(100); };
  const auto suggestions = found(job, 2, {150, 100, 160}, need);
  for (const std::string& suggestion : suggestions)
    EXPECT_NE(suggestion.find("micro_batch="), suggestion.npos) << suggestion;
  EXPECT_EQ(suggestions.size(), 3u);
  EXPECT_EQ(found(job, 2, {150, 160, 0}, need).size(), 3u) << "no smaller micro-batch for unknown activations";
}

TEST(BudgetTest, SuggestsMoreRanksOnlyWhenTheyShareTheSamples) {
  const job::RequiredBytes need = [](const job::Suggestion& suggestion) -> std::optional<int64_t> {
    if (suggestion.overrides[0].rfind("job.ranks", 0) != 0) return {};
    return 1000 / suggestion.ranks;
  };
  EXPECT_EQ(
      found(Job({"train.gradient_accumulation=4"}), 2, {400, 500, 0}, need),
      (Texts{"job.ranks=8 train.gradient_accumulation=1: 125", "job.ranks=4 train.gradient_accumulation=2: 250"}));
  EXPECT_EQ(found(Job({"train.gradient_accumulation=3"}), 2, {400, 500, 0}, need), Texts{});
  EXPECT_EQ(found(Job({"train.gradient_accumulation=8"}), 1024, {400, 500, 0}, need), Texts{})
      << "more ranks than can be started";
}

TEST(BudgetTest, PrintsSuggestionsAsTomlLinesWithTheirSavings) {
  const job::BudgetShortfall over{100 << 20, 120 << 20, 10 << 20};
  EXPECT_EQ(text_of({{{"strategy=zero3"}, 2, 1, 40 << 20},
                     {{"job.ranks=4", "train.gradient_accumulation=2"}, 4, 1, 90 << 20}},
                    over),
            "the job fits with any one of these lines:\n"
            "  strategy = \"zero3\"                              saves 90.00 MiB, needs 40.00 MiB\n"
            "  job.ranks = 4, train.gradient_accumulation = 2  saves 40.00 MiB, needs 90.00 MiB");
  EXPECT_EQ(
      text_of({}, over),
      "no change of strategy, ranks, micro-batch or sizes makes the job fit; raise the budget, or train a smaller "
      "model");
}

}  // namespace
