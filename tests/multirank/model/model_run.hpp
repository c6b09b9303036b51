// Shared by the tests of the model outside the engine: the strategies that each body runs under, the text of an error,
// and the fixture.
#pragma once

#include <c10/util/Exception.h>

#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "support/engine_test.hpp"

namespace model_tests {

using engine_tests::Run;
using engine_tests::same;
using zr::test::RankBodyOf;

/// A strategy, and whether the ranks of a node share weights. A single rank always has `share` set.
struct SharingMode {
  std::string strategy;
  bool share;
  std::string text(int world) const { return strategy + (world == 1 ? "" : share ? " shared" : " not shared"); }
};

/// The layouts of weights (support/layouts.hpp): a copy per rank, one copy per host, sharded.
inline std::vector<SharingMode> sharing_modes(int world) {
  if (world == 1) return {{"zero0", true}, {"zero1", true}, {"zero3", true}};
  return {{"zero0", false}, {"zero1", true}, {"zero3", false}};
}

inline const std::vector<std::string> kPlainSgd{"optimizer=sgd", "optimizer.sgd.momentum=0.0",
                                                "optimizer.sgd.nesterov=false", "optimizer.sgd.weight_decay=0.0"};

/// The program of `run` under another strategy. The learning rate is a power of two, so that products of plain SGD are
/// exact; zero3 releases each weight after its use.
inline zr::Program program_of(const Run& run, const SharingMode& how, const std::vector<std::string>& more = {},
                              const std::vector<std::string>& optimizer = kPlainSgd) {
  std::vector<std::string> overrides(run.arguments.begin() + 1, run.arguments.end());
  overrides.insert(overrides.end(), optimizer.begin(), optimizer.end());
  for (const char* key : {"optimizer.lr=0.0625", "train.gradient_clipping=0.0", "train.steps=4"})
    overrides.emplace_back(key);
  if (how.strategy == "zero3")
    for (const char* key : {"max_live_bytes", "max_reuse_bytes", "prefetch_bytes"})
      overrides.push_back(std::string("strategy.zero3.") + key + "=0");
  overrides.push_back("strategy.use=" + how.strategy);
  overrides.push_back(std::string("communicator.share_weights=") + (how.share ? "true" : "false"));
  overrides.insert(overrides.end(), more.begin(), more.end());
  return zr::Program(run.arguments[0], overrides,
                     {{"parity.model", "everything", "which model"},
                      {"parity.weighted", false, "unused here"},
                      {"parity.overflows", false, "unused here"}});
}

/// The message of the exception that fn throws, without libtorch's backtrace; empty if fn returns.
template <class F>
std::string error_of(F&& fn) {
  try {
    fn();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Prints on rank 0, when it is destroyed, which strategies have each outcome.
class Outcomes {
 public:
  explicit Outcomes(const Run& run) : world_(run.program.world()), prints_(run.program.rank() == 0) {}
  ~Outcomes() {
    for (const auto& [outcome, modes] : modes_)
      if (prints_) std::cout << modes << ": " << outcome << std::endl;
  }
  Outcomes(const Outcomes&) = delete;
  void add(const SharingMode& how, const std::string& outcome) {
    std::string& modes = modes_[outcome];
    modes += (modes.empty() ? "" : ", ") + how.text(world_);
  }

 private:
  int world_;
  bool prints_;
  std::map<std::string, std::string> modes_;
};

class EngineModelTest : public engine_tests::EngineTest {
 public:
  using Run = engine_tests::Run;

 protected:
  // Runs check_messages() on a golden file, and checks that all its cases exit with 0.
  void check_outcomes(const std::string& file, std::size_t least_cases) {
    check_messages(file, least_cases);
    for (const zr::golden::Case& one : zr::golden::read_file(ZR_SOURCE_DIR "/tests/golden/" + file).cases)
      EXPECT_EQ(one["exit"], "") << file << ", " << one.title;
  }
};

}  // namespace model_tests
