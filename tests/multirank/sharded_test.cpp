// Sharded parameters: what a program may do with them, and the errors for what it may not do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "contract/shell.hpp"

namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

using Result = zr::testing::Outcome;

class ShardedParametersTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("sharded-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result launch(int ranks, const std::string& program, const std::string& toml, const std::string& overrides) {
    return zr::testing::shell(
        ZR_BUILD_DIR "/bin/zeroth launch -n " + std::to_string(ranks) + " -- " ZR_BUILD_DIR "/tests/" + program +
        " " ZR_SOURCE_DIR "/tests/multirank/operators/" + toml + " job.ranks=" + std::to_string(ranks) +
        " job.runs=\"" + folder_.string() + "\" " + overrides);
  }
  Result run(const std::string& name, const std::string& strategy = "zero3", const std::string& overrides = "") {
    return launch(2, "sharded_case " + name, "operators.toml",
                  "optimizer.lr=0.01 strategy.use=" + strategy + " " + overrides);
  }
  // The lines that the program printed on rank 0.
  static std::string said(const Result& result) {
    std::string own;
    std::istringstream lines(result.output);
    for (std::string line; std::getline(lines, line);)
      if (line.rfind("[", 0) != 0 && line.rfind("zeroth:", 0) != 0) own += line + "\n";
    return own;
  }
  // The program must end with a user error whose message contains `text`.
  void rejects(const std::string& name, const std::string& text, const std::string& strategy = "zero3") {
    const Result result = run(name, strategy);
    EXPECT_EQ(result.code == 2 || result.code == 1, true) << name << ": " << result.code << "\n" << result.output;
    EXPECT_THAT(result.output, HasSubstr(text)) << name;
    EXPECT_THAT(result.output, Not(HasSubstr("SIG"))) << name;
  }
  fs::path folder_;
};

const std::string kSharded =
    "parameter 'first.weight' is sharded: it has memory only inside operators; read or write it within a "
    "zr::gather(parameter) scope";
const std::string kInstead =
    "call torch::load() within a zr::gather(model->parameters()) scope, or engine.set() or engine.load(); call "
    "module->to() and set_data() before the engine is made";
const std::string kGradient =
    "the gradient of 'first.weight' belongs to the engine: read it with engine.get(\"first.weight\", "
    "zr::TensorKind::gradient), "
    "clip with train.gradient_clipping, update with engine.step(), and call engine.backward(loss) instead of "
    "loss.backward(); if the loss belongs to another engine (as in a GAN), call requires_grad_(false) on these "
    "parameters around its backward";

class OperatorsTest : public ShardedParametersTest, public testing::WithParamInterface<std::tuple<std::string, int>> {};

TEST_P(OperatorsTest, MatchPlainLibtorch) {
  const auto& [name, ranks] = GetParam();
  const Result result =
      launch(ranks, "operators_trainer", "operators.toml",
             "strategy.use=" + name.substr(0, 5) + (name.size() > 5 ? " communicator.share_weights=true" : ""));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, Not(HasSubstr("WRONG")));
  int right = 0, dense = 0;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) {
    right += line.rfind("ok ", 0) == 0;
    dense += line.find("the sparse gradient of 'weight' is converted to dense") != line.npos;
  }
  EXPECT_EQ(right, 71) << "cases of rank 0";
  EXPECT_EQ(dense, 1) << "reported once, not once per step or per rank";
}
INSTANTIATE_TEST_SUITE_P(
    Strategies, OperatorsTest,
    testing::Combine(testing::Values("zero0", "zero3", "zero1Shared", "zero2Shared", "zero3Shared"),
                     testing::Values(1, 2, 4)),
    [](const auto& info) { return std::get<0>(info.param) + "On" + std::to_string(std::get<1>(info.param)); });

class OperatorsOffloadTest : public ShardedParametersTest,
                             public testing::WithParamInterface<std::tuple<std::string, std::string>> {};

TEST_P(OperatorsOffloadTest, MatchPlainLibtorch) {
  const auto& [strategy, tier] = GetParam();
  const Result result = launch(2, "operators_trainer", "operators.toml",
                               "strategy.use=" + strategy + " offload.activation_bytes=1B offload.activations=" + tier +
                                   (tier == "nvme" ? " offload.nvme.path=" + folder_.string() : ""));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, Not(HasSubstr("WRONG")));
  int right = 0;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) right += line.rfind("ok ", 0) == 0;
  EXPECT_EQ(right, 71) << "cases of rank 0";
}
INSTANTIATE_TEST_SUITE_P(Tiers, OperatorsOffloadTest,
                         testing::Combine(testing::Values("zero0", "zero3"), testing::Values("cpu", "nvme")),
                         [](const auto& info) { return std::get<0>(info.param) + std::get<1>(info.param); });

TEST_F(ShardedParametersTest, RawReadsReportTheParameterAndTheRemedy) {
  for (const std::string name : {"reads_pointer", "reads_accessor", "saves_module", "aliases_storage"})
    rejects(name, kSharded);
}

TEST_F(ShardedParametersTest, GatherScopeProvidesMemory) {
  EXPECT_EQ(run("saves_gathered_module").code, 0);
  for (const std::string name : {"writes", "reads_gathered", "nests_scopes"})
    for (const std::string dtype : {"fp32", "bf16"}) {
      const Result unsharded = run(name, "zero0", "train.dtype=" + dtype),
                   sharded = run(name, "zero3", "train.dtype=" + dtype);
      EXPECT_EQ(unsharded.code, 0) << unsharded.output;
      EXPECT_EQ(sharded.code, 0) << sharded.output;
      EXPECT_EQ(said(sharded), said(unsharded)) << name << ", " << dtype;
    }
}

TEST_F(ShardedParametersTest, OwnersWriteSharedWeightsOnce) {
  for (const std::string dtype : {"fp32", "bf16"})
    for (const std::string name : {"writes", "reads_gathered", "infers", "nests_scopes"}) {
      const Result unsharded = run(name, "zero0", "train.dtype=" + dtype);
      EXPECT_EQ(unsharded.code, 0) << unsharded.output;
      for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
        const Result shared = run(name, strategy, "communicator.share_weights=true train.dtype=" + dtype);
        EXPECT_EQ(shared.code, 0) << shared.output;
        EXPECT_EQ(said(shared), said(unsharded)) << name << ", " << strategy << ", " << dtype;
      }
    }
  rejects("converts_module",
          "parameter 'first.weight' is shared by the ranks of this host (communicator.share_weights): it has memory "
          "only inside "
          "operators; read or write it within a zr::gather(parameter) scope; to replace its data, " +
              kInstead,
          "zero1 communicator.share_weights=true");
}

TEST_F(ShardedParametersTest, HostHoldsSharedWeightsOnce) {
  const double weights = 4.0 * (2 * 1024 * 2048 + 2048 + 1024);
  struct Held {
    double shared, all;  // bytes of both ranks: in shared memory, and in total
  };
  const auto held = [&](const std::string& strategy, const std::string& alias) {
    const Result result = run("tells_shared_memory", strategy,
                              "strategy." + strategy + ".bucket_bytes=64KiB communicator.share_weights=" + alias);
    EXPECT_EQ(result.code, 0) << result.output;
    Held bytes{};
    std::istringstream(said(result)) >> bytes.shared >> bytes.all;
    return bytes;
  };
  for (const std::string strategy : {"zero1", "zero2"}) {
    const Held copied = held(strategy, "false"), aliased = held(strategy, "true");
    EXPECT_NEAR((copied.shared - aliased.shared) / weights, 1, 0.02) << strategy << ": one copy fewer with two ranks";
    EXPECT_NEAR((copied.all - aliased.all) / weights, 1, 0.25) << strategy << ": no copy elsewhere";
  }
  // zero3 has the same reduced gradients and buckets as zero2, and no all-gather buffer.
  const Held zero2 = held("zero2", "true"), zero3 = held("zero3", "true");
  EXPECT_NEAR(zero3.shared / zero2.shared, 1, 0.02) << "zero3 also holds the weights once";
  EXPECT_NEAR((zero3.all - zero2.all) / weights, 0, 0.25);
}

TEST_F(ShardedParametersTest, ScopeOverTwoEnginesEntersThemInTheSameOrderOnAllRanks) {
  const Result unsharded = run("gathers_of_two_engines", "zero0");
  EXPECT_EQ(unsharded.code, 0) << unsharded.output;
  for (const std::string strategy : {"zero1 communicator.share_weights=true", "zero3"}) {
    const Result result = run("gathers_of_two_engines", strategy);
    EXPECT_EQ(result.code, 0) << strategy << "\n" << result.output;
    EXPECT_EQ(said(result), said(unsharded)) << strategy;
  }
}

TEST_F(ShardedParametersTest, IgnoresWritesOfAnOperatorThatThrew) {
  const Result unsharded = run("throws_in_place", "zero0");
  EXPECT_EQ(unsharded.code, 0) << unsharded.output;
  for (const std::string strategy : {"zero1", "zero2", "zero3"})
    for (const std::string alias : {"true", "false"}) {
      const Result sharded = run("throws_in_place", strategy, "communicator.share_weights=" + alias);
      EXPECT_EQ(sharded.code, 0) << sharded.output;
      EXPECT_EQ(said(sharded), said(unsharded)) << strategy << " " << alias;
    }
}

TEST_F(ShardedParametersTest, CountsWeightsGatheredOutsideTheBufferAgainstTheBudget) {
  const Result free = run("gathers_all");
  EXPECT_EQ(free.code, 0) << free.output;
  EXPECT_THAT(free.output, HasSubstr("6 parameters gathered"));
  const Result bounded = run("gathers_all", "zero3", "memory.device_budget=44MB");
  EXPECT_EQ(bounded.code, 2) << bounded.output;
  EXPECT_THAT(bounded.output, HasSubstr("memory.device_budget is "));
  EXPECT_THAT(bounded.output, Not(HasSubstr("6 parameters gathered")));
}

TEST_F(ShardedParametersTest, RecomputedBlocksHoldFewerActivationsAndAreBitIdentical) {
  const auto most = [&](const std::string& name, const std::string& strategy) {
    const Result result = run(name, strategy, "job.name=" + name + " train.steps=2");
    EXPECT_EQ(result.code, 0) << result.output;
    const auto summary = nlohmann::json::parse(std::ifstream(folder_ / name / "summary.json"));
    return std::pair(said(result), summary["memory"]["device"]["activations"]["peak"].get<double>());
  };
  for (const std::string strategy : {"zero0", "zero3"}) {
    const auto [hash, kept] = most("keeps_activations", strategy);
    const auto [same, dropped] = most("recomputes_activations", strategy);
    EXPECT_EQ(same, hash);
    EXPECT_LT(dropped, 0.5 * kept) << strategy;
  }
}

TEST_F(ShardedParametersTest, FailedBackwardEndsTraining) {
  for (const std::string strategy : {"zero0", "zero3"})
    rejects("goes_on_after_failure",
            "the last engine.backward() ended with an exception, so its gradients are incomplete; end the job, or "
            "create a new engine",
            strategy);
}

TEST_F(ShardedParametersTest, RejectsAStepInsideAScope) {
  rejects("steps_within_scope",
          "engine.step() was called inside a zr::gather scope of 'first.weight'; nothing was changed; end the scope "
          "before the call",
          "zero1 communicator.share_weights=true");
  for (const std::string name : {"reads_pointer", "saves_module"})
    rejects(name, "parameter 'first.weight' is shared by the ranks of this host",
            "zero2 communicator.share_weights=true");
  rejects("steps_within_scope",
          "engine.step() was called inside a zr::gather scope of 'first.weight'; nothing was changed; end the scope "
          "before the call");
}

TEST_F(ShardedParametersTest, RejectsReplacedParameterData) {
  for (const std::string name : {"converts_module", "loads_module"})
    rejects(name, kSharded + "; to replace its data, " + kInstead);
  rejects("converts_module",
          "the data of parameter 'first.weight' was replaced after the engine was made (torch::load(), module->to(), "
          "set_data()); " +
              kInstead,
          "zero1");
}

TEST_F(ShardedParametersTest, RejectsForeignAccessToGradients) {
  for (const std::string strategy : {"zero0", "zero3"})
    for (const std::string name : {"own_optimizer", "clips_itself", "plain_backward"}) {
      const Result result = run(name, strategy);
      EXPECT_EQ(result.code, 2) << name << "\n" << result.output;
      EXPECT_THAT(result.output, HasSubstr("the gradient of '")) << name;
      EXPECT_THAT(result.output, HasSubstr("belongs to the engine: read it with engine.get(")) << name;
    }
  rejects("own_optimizer", kGradient);
  EXPECT_EQ(run("zeroes_gradients").code, 0) << "zero_grad() is accepted";
}

TEST_F(ShardedParametersTest, RejectsASecondEngineForAModel) {
  rejects(
      "two_engines",
      "parameter 'first.weight' is trained by another zr::Engine; call release() on that engine first, or give each "
      "engine its own model");
  EXPECT_EQ(run("one_engine_after_another").code, 0);
  rejects("outlives_engine",
          "the engine that sharded parameter 'first.weight' was destroyed, and the parameter's values are lost; call "
          "engine.release() on all ranks before the engine is destroyed, which gives the model its full weights");
}

TEST_F(ShardedParametersTest, ReportsRanksThatUseDifferentParameters) {
  const Result result = run("other_order");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_THAT(result.output, HasSubstr("differs between ranks: "));
  EXPECT_THAT(result.output, HasSubstr("all_gather 'last.weight'"));
  EXPECT_THAT(result.output, HasSubstr("rank 1"));
}

TEST_F(ShardedParametersTest, InferenceInsideAStepChangesNothing) {
  const Result unsharded = run("infers", "zero0"), sharded = run("infers", "zero3");
  EXPECT_EQ(unsharded.code, 0) << unsharded.output;
  EXPECT_EQ(said(sharded), said(unsharded));
}

TEST_F(ShardedParametersTest, DeferredModelIsBitIdenticalToAPlainOne) {
  for (const std::string strategy : {"zero0", "zero3"}) {
    EXPECT_EQ(run("builds_initialised", strategy).output, "");
    for (const std::string dtype : {"fp32", "bf16"}) {
      const Result plain = run("builds_plainly", strategy, "train.dtype=" + dtype),
                   deferred = run("builds_deferred", strategy, "train.dtype=" + dtype);
      EXPECT_EQ(plain.code, 0) << plain.output;
      EXPECT_EQ(deferred.code, 0) << deferred.output;
      EXPECT_EQ(said(deferred), said(plain)) << strategy << ", " << dtype;
    }
  }
}

TEST_F(ShardedParametersTest, DeferredModelIsNeverUnshardedInMemory) {
  const std::string small = "operators.toml", how = "strategy.zero3.prefetch_bytes=1MiB train.steps=1";
  const Result plain = launch(4, "sharded_case builds_under_cap", small, how),
               deferred = launch(4, "sharded_case builds_deferred_under_cap", small, how);
  EXPECT_NE(plain.code, 0) << "64 MiB do not fit into 40";
  EXPECT_THAT(plain.output, HasSubstr("memory"));
  EXPECT_EQ(deferred.code, 0) << deferred.output;
}

TEST_F(ShardedParametersTest, ReleaseWithoutMemoryOnOneRankFailsOnAllAndTrainingContinues) {
  const std::string shared = "zero1 communicator.share_weights=true", bounded = "zero3 memory.device_budget=2GiB";
  const std::map<std::string, std::vector<std::string>> all{{"fp32", {"zero0", shared, "zero3", bounded}},
                                                            {"bf16", {shared}}};
  for (const auto& [dtype, strategies] : all) {
    const std::string how = " train.dtype=" + dtype;
    const Result plenty = run("releases_without_memory", "zero0", "job.name=plenty" + how);
    EXPECT_EQ(plenty.code, 0) << plenty.output;
    for (const std::string& strategy : strategies) {
      const Result result = run("releases_without_memory", strategy, how);
      EXPECT_EQ(result.code, 0) << strategy << how << "\n" << result.output;
      EXPECT_EQ(said(result), said(plenty)) << strategy << how;
    }
  }
}

TEST_F(ShardedParametersTest, RefreshWithoutMemoryOnOneRankFailsOnAllAndChangesNothing) {
  const Result plenty = run("refreshes_without_memory", "zero0", "job.name=plenty");
  EXPECT_EQ(plenty.code, 0) << plenty.output;
  for (const std::string strategy :
       {"zero0", "zero1 communicator.share_weights=true", "zero3", "zero3 memory.device_budget=2GiB"}) {
    const Result result = run("refreshes_without_memory", strategy);
    EXPECT_EQ(result.code, 0) << strategy << "\n" << result.output;
    EXPECT_EQ(said(result), said(plenty)) << strategy;
  }
}

TEST_F(ShardedParametersTest, DeferredModelReportsThatItHasNoValues) {
  rejects(
      "uses_deferred",
      "this tensor was built by zr::deferred: it has values once the zr::Engine is made; read them with engine.get(), "
      "or build the model without zr::deferred");
  rejects("builds_by_value",
          "zr::deferred: aten::item needs values, which a deferred model has only after the engine is made; call it "
          "after that, or build the model without zr::deferred");
}

}  // namespace
