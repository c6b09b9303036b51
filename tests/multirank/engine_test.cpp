// zr::Engine through the public door: real ranks, real plug-ins, real files.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

struct Result {
  int code;
  std::string output;
};

class Engine : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("engine-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result run(int ranks, const std::string& name, const std::string& overrides = "", const std::string& list = "") {
    const std::string command =
        "ENGINE_CASE_LIST=" + list +
        std::string(" ZR_PLUGIN_PATH=" ZR_BUILD_DIR "/tests/plugins " ZR_BUILD_DIR "/bin/zeroth launch -n ") +
        std::to_string(ranks) + " -- " ZR_BUILD_DIR "/tests/engine_case " + name +
        " " ZR_SOURCE_DIR "/tests/multirank/parity/parity.toml job.name=run job.runs=\"" + folder_.string() +
        "\" job.threads=1 job.ranks=" + std::to_string(ranks) + " " + overrides + " 2>&1";
    Result result{0, ""};
    FILE* pipe = ::popen(command.c_str(), "r");
    char buffer[4096];
    for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) result.output.append(buffer, n);
    result.code = WEXITSTATUS(::pclose(pipe));
    return result;
  }
  // Trains many configurations in one launch; each line of overrides names its run with job.name.
  Result run_all(int ranks, const std::vector<std::string>& lines) {
    std::ofstream list(folder_ / "list");
    for (const auto& line : lines) list << line << "\n";
    list.close();
    return run(ranks, "trains_list", "", (folder_ / "list").string());
  }
  Json summary(const std::string& name = "run") const {
    std::ifstream in(folder_ / name / "summary.json");
    return Json::parse(in);
  }
  std::vector<Json> metrics(const std::string& name = "run") const {
    std::ifstream in(folder_ / name / "metrics.jsonl");
    std::vector<Json> rows;
    for (std::string line; std::getline(in, line);) rows.push_back(Json::parse(line));
    return rows;
  }
  fs::path folder_;
};

// The parameters of parity::Everything: trainable, and frozen.
struct Sizes {
  std::vector<int64_t> trainable{61 * 36, 36 * 36, 36, 577 * 36, 577, 36 * 577, 36, 36, 36, 36, 36, 36 * 36, 36, 21, 1};
  std::vector<int64_t> frozen{36 * 36, 36};
  static int64_t sum(const std::vector<int64_t>& counts) {
    int64_t total = 0;
    for (const int64_t n : counts) total += n;
    return total;
  }
  // Every parameter starts at a multiple of 32 elements.
  static int64_t aligned(const std::vector<int64_t>& counts) {
    int64_t total = 0;
    for (const int64_t n : counts) total += (n + 31) / 32 * 32;
    return total;
  }
};

TEST_F(Engine, TakesRankZerosParameters) {
  const Result result = run(3, "takes_rank_zero", "strategy=zero1");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(Engine, GetsAndSetsWholeTensorsUnderEveryStrategy) {
  for (const char* strategy : {"zero0", "zero1", "dealt"})
    for (const char* dtype : {"fp32", "bf16"}) {
      const Result result = run(3, "gets_and_sets", std::string("strategy=") + strategy + " train.dtype=" + dtype);
      EXPECT_EQ(result.code, 0) << strategy << " " << dtype << "\n" << result.output;
    }
}

TEST_F(Engine, SkipsAStepWithNonFiniteGradientsOnAllRanks) {
  for (const char* strategy : {"zero0", "zero1"}) {
    const Result result = run(2, "skips_non_finite", std::string("train.steps=5 strategy=") + strategy);
    EXPECT_EQ(result.code, 0) << result.output;
    const auto rows = metrics();
    ASSERT_EQ(rows.size(), 3u);
    EXPECT_TRUE(rows[1].contains("skipped"));
    EXPECT_FALSE(rows[2].contains("skipped"));
  }
}

TEST_F(Engine, LeavesAnUnusedParameterAlone) {
  const Result result = run(2, "keeps_untouched", "strategy=zero1");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(Engine, EvaluationLeavesTheRandomStateAlone) {
  const Result result = run(2, "evaluates", "strategy=zero1");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(Engine, FollowsLibtorchsAdamW) {
  const Result result =
      run(1, "follows_torch_adamw", "strategy=zero0 parity.model=recurrent train.steps=20 optimizer.lr=0.001");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(Engine, NamesTheRankWhoseDataEndsEarly) {
  const Result result = run(2, "ends_early", "strategy=zero1 train.steps=50");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_NE(result.output.find("rank 1"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("after step 2"), std::string::npos) << result.output;
}

TEST_F(Engine, GivesTheSameWeightsUnderEveryStrategyAndTwice) {
  std::string hash;
  for (const char* how : {"strategy=zero0", "strategy=zero1", "strategy=dealt", "strategy=zero1"}) {
    const Result result =
        run(2, "trains", std::string("train.steps=4 train.accumulation=2 parity.model=dropout ") + how);
    ASSERT_EQ(result.code, 0) << result.output;
    if (hash.empty()) hash = summary()["weights_hash"];
    EXPECT_EQ(summary()["weights_hash"], hash) << how;
  }
  EXPECT_EQ(hash.size(), 16u);
}

struct Cell {
  std::string strategy, dtype;
  int ranks, A;
  std::string name() const { return strategy + "-" + dtype + "-n" + std::to_string(ranks) + "-a" + std::to_string(A); }
  int64_t w() const { return dtype == "bf16" ? 2 : 4; }
};

// Trains every cell of a number of ranks for two steps, in one launch.
std::vector<Cell> cells_of(int ranks) {
  std::vector<Cell> cells;
  for (const int A : {1, 4})
    for (const std::string dtype : {"fp32", "bf16"})
      for (const std::string strategy : {"zero0", "zero1"}) cells.push_back({strategy, dtype, ranks, A});
  return cells;
}
std::vector<std::string> lines_of(const std::vector<Cell>& cells) {
  std::vector<std::string> lines;
  for (const Cell& c : cells)
    lines.push_back("job.name=" + c.name() + " train.steps=2 train.accumulation=" + std::to_string(c.A) +
                    " train.dtype=" + c.dtype + " strategy=" + c.strategy);
  return lines;
}

class EngineFormulas : public Engine, public testing::WithParamInterface<int> {};

TEST_P(EngineFormulas, HoldForWireAndLedger) {
  const int N = GetParam();
  const auto cells = cells_of(N);
  const Result result = run_all(N, lines_of(cells));
  ASSERT_EQ(result.code, 0) << result.output;
  const Sizes sizes;
  const int64_t P = Sizes::sum(sizes.trainable), padded = Sizes::aligned(sizes.trainable),
                whole = padded + Sizes::aligned(sizes.frozen);
  // A shard differs from the mean by less than a leaf in each of the (at most five) buckets, alignment included.
  const int64_t leaf = 5 * (1024 + 32 * 15);
  for (const Cell& c : cells) {
    const int64_t step = c.A * c.w() * P * (N - 1) + (c.strategy == "zero0" ? 4 : c.w()) * P * (N - 1);
    for (const Json& row : metrics(c.name())) EXPECT_EQ(row["wire_bytes"], step) << c.name();
    const Json s = summary(c.name()), memory = s["memory"]["device"];
    int64_t wire = 0;
    for (const auto& [operation, bytes] : s["wire_bytes"].items())
      wire += operation == "control" ? 0 : bytes.get<int64_t>();
    EXPECT_EQ(wire, 2 * step) << c.name();

    const std::string where = c.name() + "\n" + memory.dump(2);
    for (const char* kind : {"weights", "gradients", "slots"})
      EXPECT_EQ(memory[kind]["planned"], memory[kind]["peak"]) << kind << " " << where;
    const bool sharded = c.strategy == "zero1";
    const int64_t share = sharded ? padded / N : padded, slack = sharded && N > 1 ? leaf : 32 * 15;
    EXPECT_EQ(memory["weights"]["peak"], c.w() * whole) << where;
    EXPECT_NEAR(memory["slots"]["peak"], 8 * share, 8 * slack) << where;
    EXPECT_EQ(memory.contains("master"), c.w() == 2) << where;
    if (c.w() == 2) {
      EXPECT_NEAR(memory["master"]["peak"], 4 * share, 4 * slack) << where;
    }
    if (!sharded) {
      EXPECT_EQ(memory["gradients"]["peak"], 4 * padded) << where;
      EXPECT_LE(memory["buckets"]["peak"], 2 * 65536) << where;
    } else if (c.w() == 4 && c.A == 1) {
      EXPECT_EQ(memory["gradients"]["peak"], 4 * padded) << where;
    } else {
      EXPECT_NEAR(memory["gradients"]["peak"], c.w() * padded + 4 * share, 4 * slack) << where;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, EngineFormulas, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return "On" + std::to_string(info.param); });

TEST_F(Engine, AllBucketsButTheLastLeaveBeforeTheLastGradientArrives) {
  for (const char* strategy : {"zero0", "zero1"}) {
    const Result result = run(2, "trains", std::string("parity.model=wide train.steps=3 strategy=") + strategy);
    ASSERT_EQ(result.code, 0) << result.output;
    const Json overlap = summary()["overlap"];
    const int64_t buckets = overlap["collectives"].get<int64_t>() / 3;
    EXPECT_GT(buckets, 3);
    EXPECT_EQ(overlap["early"], 3 * (buckets - 1)) << overlap;
  }
}

TEST_F(Engine, WritesTheRunFolder) {
  const Result result = run(2, "trains", "train.steps=3 strategy=zero1");
  ASSERT_EQ(result.code, 0) << result.output;
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 3u);
  for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_s", "wire_bytes"})
    EXPECT_TRUE(rows[0].contains(key)) << key;
  EXPECT_EQ(rows[2]["step"], 3);
  EXPECT_EQ(rows[0]["tokens"], 6) << "two ranks, micro-batches of three samples";
  const Json s = summary();
  for (const char* key :
       {"steps", "ranks", "loss", "val_loss", "weights_hash", "tokens_per_s", "memory", "wire_bytes", "time_ms"})
    EXPECT_TRUE(s.contains(key)) << key;
  EXPECT_EQ(s["loss"], rows[2]["loss"]);
  EXPECT_EQ(s["ranks"], 2);
  EXPECT_TRUE(fs::exists(folder_ / "run" / "config.toml"));
}

struct Mistake {
  const char* name;
  int ranks, code;
  const char* says;
};

class EngineMistakes : public Engine, public testing::WithParamInterface<Mistake> {};

TEST_P(EngineMistakes, AreNamedWithTheirRemedy) {
  const Result result = run(GetParam().ranks, GetParam().name, "strategy=zero1");
  EXPECT_EQ(result.code, GetParam().code) << result.output;
  EXPECT_NE(result.output.find(GetParam().says), std::string::npos) << result.output;
}
INSTANTIATE_TEST_SUITE_P(
    Of, EngineMistakes,
    testing::Values(
        Mistake{"backward_outside", 1, 2, "a backward ran outside engine.backward() and gave '"},
        Mistake{"backward_twice", 1, 2,
                "engine.backward() was called 2 times without engine.step(); call engine.step() after every backward"},
        Mistake{"step_without_backward", 1, 2, "engine.step() was called without engine.backward(loss) before it"},
        Mistake{"loss_of_many", 1, 2, "engine.backward(loss): the loss has 3 elements, but must be one number"},
        Mistake{"no_such_parameter", 1, 2, "the model has no parameter 'twice.wieght'; did you mean 'twice.weight'?"},
        Mistake{"no_such_state", 1, 2, "optimizer 'adamw' has no state 'momentum'; it has: exp_avg, exp_avg_sq"},
        Mistake{"another_model", 2, 2,
                "the ranks do not train the same job: rank 1 has 'parameter line.weight [1 2 ]', rank 0 has 'parameter "
                "unused [7 3 ]'"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
