// Multi-rank tests. The test program is also the program of the ranks: a test launches it with the name of a rank body,
// a function that then runs on each rank of the job. So the code of the ranks is beside the test that launches it.
//
// MULTIRANK_TEST defines both at once. It passes if the body runs to its end without a failed assertion on every rank
// of every job:
//
//   MULTIRANK_TEST(EngineTest, MeanAveragesOverRanks, {2, 3}, {"strategy=zero0", "strategy=zero3"}) {
//     run.build();
//     EXPECT_EQ(run.engine->mean(run.engine->rank()), (run.engine->world() - 1) / 2.0);
//   }
//
// A test that compares several jobs, or that checks messages, exit codes or files, launches named bodies itself:
//
//   RANK_BODY(prints_hash, Run) {
//     run.build();
//     std::cout << run.engine->weights_hash();
//   }
//   TEST_F(EngineTest, StrategiesGiveEqualWeights) {
//     EXPECT_EQ(run(2, prints_hash, "strategy=zero3").output, run(2, prints_hash, "strategy=zero0").output);
//   }
//
// A failed EXPECT_ or ASSERT_ on a rank prints its location and message, and the rank exits with kFailedAssertion.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zr::test {

inline constexpr int kFailedAssertion = 65;

/// A function that runs on each rank of a job, known by its name to the processes of the job. Names are unique in a
/// test program.
class RankBody {
 public:
  /// Runs in the process of a rank; gets the configuration file and the overrides from the command line.
  using Function = std::function<void(const std::string& toml, const std::vector<std::string>& overrides)>;

  /// Registers the body. Ends the program if the name is taken.
  RankBody(std::string name, Function function);
  const std::string& name() const { return name_; }
  /// True if the program has a body of this name.
  static bool exists(const std::string& name);

 private:
  std::string name_;
};

/// A body that gets a Run, which is constructed from the configuration file and the overrides.
template <class Run>
class RankBodyOf : public RankBody {
 public:
  RankBodyOf(const std::string& name, std::function<void(Run&)> body)
      : RankBody(name,
                 [body](const std::string& toml, const std::vector<std::string>& overrides) {
                   Run run(toml, overrides);
                   body(run);
                 }),
        body_(std::move(body)) {}
  /// Calls the body from another body.
  void operator()(Run& run) const { body_(run); }

 private:
  std::function<void(Run&)> body_;
};

/// The command line that runs a body in the process of a rank; the configuration file and overrides follow.
std::string rank_command(const std::string& body);

/// The first words of the same command line.
std::vector<std::string> rank_words(const RankBody& body);

/// Whether jobs of several ranks run over MPI, on hosts that the ranks pretend to be on (ZR_TEST_HOSTS): see
/// run_job_command().
bool jobs_run_on_hosts();

/// One job per number of ranks and overrides.
struct Jobs {
  std::vector<int> ranks;
  std::vector<std::string> overrides{""};
};

/// Every combination of one element of each list, separated by spaces.
inline std::vector<std::string> combine(const std::vector<std::vector<std::string>>& lists) {
  std::vector<std::string> all{""};
  for (const auto& list : lists) {
    std::vector<std::string> next;
    for (const auto& begun : all)
      for (const auto& one : list) next.push_back(begun.empty() ? one : begun + " " + one);
    all = std::move(next);
  }
  return all;
}

}  // namespace zr::test

/// Skips the test if its jobs would run on several hosts: it checks what holds on one host only. `reason`: why.
#define ONE_HOST_ONLY(reason) \
  if (zr::test::jobs_run_on_hosts()) GTEST_SKIP() << "one host only: " << (reason)

/// Defines the rank body `name`; it gets `RunType& run`.
#define RANK_BODY(name, RunType)                                   \
  void name##_on_rank(RunType& run);                               \
  const zr::test::RankBodyOf<RunType> name(#name, name##_on_rank); \
  void name##_on_rank([[maybe_unused]] RunType& run)

/// Defines the test Suite.Name. The other arguments are those of Jobs: {numbers of ranks}, {overrides}. The fixture has
/// the type Run and `Outcome run(int ranks, const RankBody&, const std::string& overrides)`.
#define MULTIRANK_TEST(Suite, Name, ...)                                                                    \
  void Suite##_##Name##_on_rank(Suite::Run& run);                                                           \
  const zr::test::RankBodyOf<Suite::Run> Suite##_##Name##_body(#Suite "." #Name, Suite##_##Name##_on_rank); \
  TEST_F(Suite, Name) {                                                                                     \
    const zr::test::Jobs jobs{__VA_ARGS__};                                                                 \
    for (const int ranks : jobs.ranks)                                                                      \
      for (const std::string& overrides : jobs.overrides) {                                                 \
        const auto result = run(ranks, Suite##_##Name##_body, overrides);                                   \
        EXPECT_EQ(result.code, 0) << ranks << " ranks, " << overrides << "\n" << result.output;             \
      }                                                                                                     \
  }                                                                                                         \
  void Suite##_##Name##_on_rank([[maybe_unused]] Suite::Run& run)
