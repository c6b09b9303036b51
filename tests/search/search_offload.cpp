// Searches for operators whose gradients differ if the tensors that they save are offloaded.
#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "search/offload_language.hpp"

namespace zr::test::offload {
namespace {

constexpr std::size_t kPrograms = 2000;

struct Counts {
  std::size_t same = 0, both_throw = 0;
  std::set<uint32_t> stored;
};

std::optional<std::string> difference(const Outcome& plain, const Outcome& offloaded, Counts& counts) {
  if (offloaded.error.empty() != plain.error.empty())
    return (plain.error.empty() ? "only offloading throws: " : "only libtorch throws: ") + plain.error.substr(0, 300) +
           offloaded.error;
  if (!plain.error.empty()) return ++counts.both_throw, std::nullopt;
  for (std::size_t i = 0; i < plain.results.size(); ++i)
    if (plain.results[i].second != offloaded.results[i].second) return plain.results[i].first + " differs";
  return ++counts.same, std::nullopt;
}

class SearchOffloadTest : public ::testing::Test {
 protected:
  SearchOffloadTest() { at::set_num_threads(1); }
  Counts counts_;
};

TEST_F(SearchOffloadTest, OperatorsHaveTheGradientsOfPlainLibtorch) {
  const auto fault = [this](const Program& program) {
    const Outcome offloaded = run(program, true);
    counts_.stored.insert(offloaded.stored.begin(), offloaded.stored.end());
    return difference(run(program, false), offloaded, counts_);
  };
  const SearchResult result =
      search<Statement>({"offload.activations", generate, fault, print}, search_programs(kPrograms), search_seed());
  EXPECT_FALSE(result.failure) << *result.failure;
  EXPECT_GT(counts_.same, result.programs / 2);
  std::printf("%zu programs: same results; %zu: libtorch throws too; %zu of %zu operators had tensors restored\n",
              counts_.same, counts_.both_throw, counts_.stored.size(), operators().size());
}

// Operators that save nothing that a tier could hold. Faults of views and in-place changes are strides and versions.
const std::set<std::string> kSaveNothing{"rrelu",        "transpose",   "expand",       "multiply in place",
                                         "add in place", "fill a view", "copy in place"};

TEST_F(SearchOffloadTest, FindsAFaultInTheRecordsOfEachOperator) {
  std::set<uint32_t> hidden;
  for (uint32_t kind = 0; kind < operators().size(); ++kind)
    if (!kSaveNothing.count(operators()[kind].name)) hidden.insert(kind);
  for (uint64_t seed = 1; seed <= kPrograms && !hidden.empty(); ++seed) {
    SearchRandom random(seed);
    const Program program = generate(random);
    const Outcome plain = run(program, false);
    for (const Statement& statement : program)
      if (hidden.count(statement.kind) &&
          difference(plain, run(program, true, {Fault::What::record, statement.kind}), counts_))
        hidden.erase(statement.kind);
  }
  for (const uint32_t kind : hidden) ADD_FAILURE() << "not found: a fault of " << operators()[kind].name;
}

TEST_F(SearchOffloadTest, FindsWrongStridesTypesAndVersions) {
  for (const Fault::What what : {Fault::What::strides, Fault::What::dtype, Fault::What::version}) {
    const auto fault = [&](const Program& program) {
      return difference(run(program, false), run(program, true, {what, 0}), counts_);
    };
    EXPECT_TRUE(search<Statement>({"offload.activations", generate, fault, print}, kPrograms, 1).failure)
        << static_cast<int>(what);
  }
}

}  // namespace
}  // namespace zr::test::offload
