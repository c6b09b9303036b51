// Searches for forward code whose values and gradients differ if its blocks are in zr::checkpoint.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "search/recompute_language.hpp"

namespace zr::test::recompute {
namespace {

constexpr std::size_t kPrograms = 2000;

// The errors of zr/recompute.hpp that plain libtorch does not have.
const std::vector<std::string> kDocumented{
    "which is one of its inputs, so it cannot be recomputed",
    "which is not its own and requires gradients, so it cannot be recomputed",
    "an input of zr::checkpoint was changed in place after the block had run",
    "that was changed in place after the block had run, so the block cannot be recomputed",
    "whose cache holds a cast of its earlier values",
    "ran inside a block of zr::checkpoint",
    "when it is recomputed, which it did not use in its first run",
    "from a variable and assigns a new tensor to it",
};
const std::string kOtherDraws = "did not draw the same random numbers";

struct Counts {
  std::size_t same = 0, both_throw = 0;
  std::map<std::string, std::size_t> documented;
};

std::optional<std::string> is_documented(const Program& program, const std::string& error) {
  const bool other_draws = std::any_of(program.begin(), program.end(),
                                       [](const Statement& s) { return s.kind == Kind::other_thread_draws; });
  if (other_draws && error.find(kOtherDraws) != std::string::npos) return kOtherDraws;
  for (const std::string& text : kDocumented)
    if (error.find(text) != std::string::npos) return text;
  return std::nullopt;
}

std::optional<std::string> difference(const Program& program, const Outcome& plain, const Outcome& checkpointed,
                                      Counts& counts) {
  if (!checkpointed.error.empty()) {
    if (!plain.error.empty()) return ++counts.both_throw, std::nullopt;
    if (const auto text = is_documented(program, checkpointed.error)) return ++counts.documented[*text], std::nullopt;
    return "only zr::checkpoint throws: " + checkpointed.error;
  }
  if (!plain.error.empty()) return "only libtorch throws: " + plain.error.substr(0, plain.error.find('\n'));
  for (std::size_t i = 0; i < plain.results.size(); ++i)
    if (plain.results[i].second != checkpointed.results[i].second) return plain.results[i].first + " differs";
  return ++counts.same, std::nullopt;
}

ProgramLanguage<Statement> language(Counts& counts) {
  const auto fault = [&counts](const Program& program) {
    return difference(program, run(program, false, std::nullopt), run(program, true, std::nullopt), counts);
  };
  return {"zr::checkpoint", generate, fault, print};
}

class SearchRecomputeTest : public ::testing::Test {
 protected:
  SearchRecomputeTest() { at::set_num_threads(1); }
  Counts counts_;
};

TEST_F(SearchRecomputeTest, BlocksHaveTheResultsOfPlainLibtorch) {
  const std::size_t programs = search_programs(kPrograms);
  const SearchResult result = search(language(counts_), programs, search_seed());
  EXPECT_FALSE(result.failure) << *result.failure;
  EXPECT_GT(counts_.same, result.programs / 2);
  for (const auto& [text, count] : counts_.documented) {
    RecordProperty(text, static_cast<int>(count));
    std::printf("%zu programs: %s\n", count, text.c_str());
  }
  std::printf("%zu programs: same results; %zu: libtorch throws too\n", counts_.same, counts_.both_throw);
}

// A fault per kind of statement, in what a block's second run or the blocks' effects can get wrong.
TEST_F(SearchRecomputeTest, FindsAFaultOfEachKindOfStatement) {
  std::set<Kind> hidden;
  for (int kind = 0; kind < kKinds; ++kind) hidden.insert(static_cast<Kind>(kind));
  hidden.erase(Kind::close);
  for (uint64_t seed = 1; seed <= kPrograms && !hidden.empty(); ++seed) {
    SearchRandom random(seed);
    const Program program = generate(random);
    const Outcome plain = run(program, false, std::nullopt);
    std::erase_if(hidden, [&](Kind kind) {
      const bool occurs =
          std::any_of(program.begin(), program.end(), [&](const Statement& s) { return s.kind == kind; });
      return occurs && difference(program, plain, run(program, true, kind), counts_);
    });
  }
  for (const Kind kind : hidden) ADD_FAILURE() << "not found: a fault of " << kNames[static_cast<std::size_t>(kind)];
}

}  // namespace
}  // namespace zr::test::recompute
