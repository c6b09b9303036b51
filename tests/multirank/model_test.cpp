// Use of the model outside zr::Engine: the results equal those of plain libtorch, or an error says why not.
#include "multirank/engine_fixture.hpp"

namespace {

namespace fs = std::filesystem;

class EngineModelTest : public engine_tests::EngineTest {
 protected:
  EngineModelTest() { binary_ = "model_case"; }
  // Runs check_messages() on a golden file, and checks that all its cases exit with 0.
  void check_outcomes(const std::string& file, std::size_t least_cases) {
    check_messages(file, least_cases);
    for (const zr::golden::Case& one : zr::golden::read_file(ZR_SOURCE_DIR "/tests/golden/" + file).cases)
      EXPECT_EQ(one["exit"], "") << file << ", " << one.title;
  }
};

TEST_F(EngineModelTest, TrainsWeightAliasesAsLibtorchDoesOrRejectsThem) { check_outcomes("model_aliases.txt", 40); }

TEST_F(EngineModelTest, ReturnsWritablePointersOrThrows) { check_outcomes("model_pointers.txt", 10); }

TEST_F(EngineModelTest, ReportsParametersThatItDoesNotTrain) { check_outcomes("model_refresh.txt", 21); }

TEST_F(EngineModelTest, RefreshKeepsOldStatesAndStartsNewOnes) {
  for (const int ranks : {1, 2})
    for (const char* name : {"refresh_continues", "refresh_continues_bf16", "refresh_continues_offloaded"}) {
      const engine_tests::Result result = run(ranks, name);
      EXPECT_EQ(result.code, 0) << name << " on " << ranks << "\n" << result.output;
    }
}

TEST_F(EngineModelTest, RefreshKeepsTheLossScaleOfFp16) {
  for (const int ranks : {1, 2}) {
    const engine_tests::Result result = run(ranks, "refresh_keeps_scale");
    EXPECT_EQ(result.code, 0) << ranks << "\n" << result.output;
  }
}

TEST_F(EngineModelTest, RefreshIsBitIdenticalWithTiersAndAsynchronousCheckpoints) {
  for (const int ranks : {1, 2})
    for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
      const engine_tests::Result result = run(
          ranks, "refresh_keeps_places", "fp16.initial_scale_power=12 fp16.loss_scale_window=2 train.dtype=" + dtype);
      EXPECT_EQ(result.code, 0) << dtype << " on " << ranks << "\n" << result.output;
      EXPECT_NE(result.output.find(ranks == 1 ? "14 placements match" : "31 placements match"), std::string::npos);
      EXPECT_TRUE(fs::is_empty(folder_ / "swap")) << "an engine left files in the folder of its tier";
    }
}

TEST_F(EngineModelTest, SavesAsynchronouslyWhenARankHasNothingToSave) {
  for (const int ranks : {1, 2, 3}) {
    const engine_tests::Result result = run(ranks, "saves_aside");
    EXPECT_EQ(result.code, 0) << ranks << "\n" << result.output;
  }
}

TEST_F(EngineModelTest, CheckpointAfterRefreshLoadsAtAnotherWorldSize) {
  const auto hash = [](const engine_tests::Result& result) {
    EXPECT_EQ(result.code, 0) << result.output;
    std::smatch found;
    EXPECT_TRUE(std::regex_search(result.output, found, std::regex("hash ([0-9a-f]{16})"))) << result.output;
    return found.str(1);
  };
  const std::string saved = hash(run(2, "refresh_saves"));
  ::setenv("MODEL_CASE_RESUMES", "yes", 1);
  EXPECT_EQ(hash(run(1, "refresh_saves")), saved);
  EXPECT_EQ(hash(run(2, "refresh_saves")), saved);
  ::unsetenv("MODEL_CASE_RESUMES");
}

TEST_F(EngineModelTest, RefreshKeepsEachRanksBuffers) {
  const engine_tests::Result result = run(2, "refresh_keeps_buffers");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(EngineModelTest, RefreshTrainsATorchScriptModule) {
  for (const int ranks : {1, 2}) {
    const engine_tests::Result result = run(ranks, "refresh_script");
    EXPECT_EQ(result.code, 0) << result.output;
  }
}

TEST_F(EngineModelTest, RefreshContinuesTheRunFolder) {
  ASSERT_EQ(run(2, "refresh_saves").code, 0);
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 8u);
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]["step"], i + 1);
  EXPECT_EQ(summary()["steps"], 8);
}

TEST_F(EngineModelTest, TrainsAParameterFrozenLaterAsLibtorchDoes) {
  for (const int ranks : {1, 2}) {
    const engine_tests::Result result = run(ranks, "freezes_again");
    EXPECT_EQ(result.code, 0) << result.output;
  }
}

}  // namespace
