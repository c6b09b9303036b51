// What a run writes and prints: metrics, summary, progress, and ranks that end before the others.
#include <csignal>

#include "support/engine_test.hpp"

namespace {

using namespace engine_tests;

// The last rank is killed while it makes step 3.
RANK_BODY(is_killed_in_step_3, Run) {
  run.build();
  run.micro_step();
  run.micro_step();
  if (run.program.rank() == run.program.world() - 1) ::raise(SIGKILL);
  run.train();
}

TEST_F(EngineTest, ReportNamesTheStepInWhichARankWasKilled) {
  const Result result = run(2, is_killed_in_step_3, "strategy=zero1 train.steps=50");
  EXPECT_EQ(result.code, 4) << result.output;
  const auto killed = result.output.find("last seen: ");
  ASSERT_NE(killed, std::string::npos) << result.output;
  const std::string line = result.output.substr(killed, result.output.find('\n', killed) - killed);
  EXPECT_TRUE(line.ends_with(", step 3")) << line;
}

// Prints what the rates count.
RANK_BODY(counts_images, Run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->add_tokens(5, "images");
    run.micro_step();
  }
}

TEST_F(EngineTest, RatesHaveTheUnitOfTheProgram) {
  ASSERT_EQ(run(2, counts_images, "train.steps=2").code, 0);
  EXPECT_EQ(metrics()[0]["tokens"], 10);
  EXPECT_EQ(summary()["unit"], "images");
  ASSERT_EQ(run(1, trains, "train.steps=2").code, 0);
  EXPECT_EQ(summary()["unit"], "samples");
}

// Trains until `rank` runs out of data: at that step and micro-batch it leaves the loop.
void until(Run& run, int rank, int64_t step, int64_t micro) {
  run.build();
  while (!run.engine->done() && !(run.engine->rank() == rank && run.engine->step_index() == step &&
                                  run.engine->micro_index() / run.engine->world() == micro))
    run.micro_step();
}

RANK_BODY(ends_early, Run) { until(run, run.program.world() - 1, 2, 0); }

RANK_BODY(ends_early_first, Run) { until(run, 0, 2, 0); }

RANK_BODY(ends_early_inside, Run) { until(run, run.program.world() - 1, 2, 1); }

TEST_F(EngineTest, NamesRankThatRunsOutOfData) {
  const Result result = run(2, ends_early, "strategy=zero1 train.steps=50");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_NE(result.output.find("rank 1"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("after step 2"), std::string::npos) << result.output;
  const Result first = run(3, ends_early_first, "strategy=zero1 train.steps=50");
  EXPECT_EQ(first.code, 4) << first.output;
  EXPECT_NE(first.output.find("rank 0 ended after step 2 (ran out of data?)"), std::string::npos) << first.output;
  const Result inside = run(2, ends_early_inside, "strategy=zero1 train.steps=50 train.gradient_accumulation=2");
  EXPECT_EQ(inside.code, 4) << inside.output;
  EXPECT_NE(inside.output.find("rank 1 ended after step 2 (ran out of data?)"), std::string::npos) << inside.output;
}

// All ranks run out of data after the same step.
RANK_BODY(finishes, Run) {
  run.build();
  while (run.engine->step_index() < 2) run.micro_step();
  run.engine->finish();
}

TEST_F(EngineTest, WritesSummaryWhenAllRanksFinishEarly) {
  const Result result = run(2, finishes, "strategy=zero1 train.steps=50");
  ASSERT_EQ(result.code, 0) << result.output;
  const Json s = summary();
  EXPECT_EQ(s["steps"], 2);
  EXPECT_EQ(s["weights_hash"].get<std::string>().size(), 16u);
  EXPECT_GT(s["communication_bytes"]["reduce_scatter"], 0);
}

// The last rank throws after one step.
RANK_BODY(fails_alone, Run) {
  run.build();
  run.micro_step();
  if (run.program.rank() == run.program.world() - 1) throw std::runtime_error("the data of this rank is corrupt");
  run.train();
}

TEST_F(EngineTest, NamesRankThatFailedWithException) {
  const Result launched = run(2, fails_alone, "strategy=zero1 train.steps=50");
  EXPECT_EQ(launched.code, 1) << launched.output;
  EXPECT_NE(launched.output.find("the data of this rank is corrupt"), std::string::npos) << launched.output;
  // Without the launcher no process sees the exit code, so the failed rank must notify the survivors.
  const std::string start = "export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29653; ";
  const std::string rank = program(2, fails_alone, "strategy=zero1 train.steps=50 job.threads=1");
  const Result survivor =
      shell(start + "(RANK=1 LOCAL_RANK=1 " + rank + " > /dev/null 2>&1 &) ; RANK=0 LOCAL_RANK=0 " + rank);
  EXPECT_EQ(survivor.code, 4) << survivor.output;
  EXPECT_NE(survivor.output.find("rank 1 ended by an exception after step 1"), std::string::npos) << survivor.output;
}

TEST_F(EngineTest, WritesRunFolder) {
  const Result result = run(2, trains, "train.steps=3 strategy=zero1 communicator.share_weights=false");
  ASSERT_EQ(result.code, 0) << result.output;
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 3u);
  for (const char* key :
       {"step", "loss", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_s", "communication_bytes"})
    EXPECT_TRUE(rows[0].contains(key)) << key;
  EXPECT_EQ(rows[2]["step"], 3);
  EXPECT_EQ(rows[0]["tokens"], 6) << "two ranks with micro-batches of three samples";
  const Json s = summary();
  for (const char* key : {"steps", "ranks", "loss", "val_loss", "weights_hash", "tokens_per_s", "memory",
                          "communication_bytes", "time_ms"})
    EXPECT_TRUE(s.contains(key)) << key;
  EXPECT_EQ(s["loss"], rows[2]["loss"]);
  EXPECT_EQ(s["ranks"], 2);
  for (const char* phase : {"forward", "backward", "reduce", "step_sync", "optimizer", "gather"})
    EXPECT_GE(s["time_ms"][phase], 0) << phase;
  for (const char* operation : {"reduce_scatter", "all_gather"})
    EXPECT_GT(s["communication_bytes"][operation], 0) << operation;

  // The config.toml of a run folder is a valid configuration; a run from it gives the same weights.
  const auto hash = s["weights_hash"];
  fs::copy_file(folder_ / "run" / "config.toml", folder_ / "again.toml");
  toml_ = (folder_ / "again.toml").string();
  ASSERT_EQ(run(2, trains).code, 0);
  EXPECT_EQ(summary()["weights_hash"], hash);
}

// Writes the loss of every micro-batch, ordered by micro_index, to the file "losses" in the run folder.
RANK_BODY(prints_losses, Run) {
  run.build();
  std::vector<double> all;
  while (!run.engine->done()) {
    const auto loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    // One rank at a time: mean() of its loss and zeros, times the world size.
    for (int rank = 0; rank < run.engine->world(); ++rank)
      all.push_back(run.engine->mean(rank == run.engine->rank() ? loss.item<double>() : 0) * run.engine->world());
    run.engine->backward(loss);
    run.engine->step();
  }
  if (run.engine->rank() != 0) return;
  std::ofstream out(run.program.text("job.runs") + "/" + run.program.text("job.name") + "/losses");
  out.precision(17);
  for (const double loss : all) out << loss << "\n";
}

TEST_F(EngineTest, WritesMeanLossExactly) {
  ASSERT_EQ(run(2, prints_losses, "train.steps=2 train.gradient_accumulation=2").code, 0);
  const auto rows = metrics();
  std::ifstream losses(folder_ / "run" / "losses");
  for (const Json& row : rows) {
    double sum = 0, loss = 0;
    for (int m = 0; m < 4; ++m) {
      ASSERT_TRUE(losses >> loss);
      sum += loss;
    }
    EXPECT_EQ(row["loss"].get<double>(), sum / 4);
  }
}

RANK_BODY(validates, Run) {
  run.build();
  run.train();
  run.engine->validation(1.5);
}

TEST_F(EngineTest, ShowsProgressAsLinesOrOnOneTerminalLine) {
  const std::string launch = ZR_BUILD_DIR "/bin/zeroth launch -n 1 -- ";
  const std::string steps = program(1, validates, "train.steps=3");
  const Result plain = shell("export ZR_PROGRESS=plain; " + launch + steps);
  ASSERT_EQ(plain.code, 0) << plain.output;
  for (const char* words : {"step 1/3  loss ", "  lr 5.00e-02  ", " samples/s  left ", "  memory device ",
                            "  waits: compute ", "step 3/3  validation loss 1.5000", "plan: ", "\ntrained 3 steps in ",
                            " 9 samples, ", "\nrun folder: ", "/run/1\nno weights were saved; "})
    EXPECT_NE(plain.output.find(words), std::string::npos) << words << " in\n" << plain.output;
  EXPECT_EQ(plain.output.find('\r'), std::string::npos) << plain.output;
  // Without the launcher, and without the variable.
  const Result alone =
      shell("export ZR_PROGRESS=; " + steps + " checkpoint.every=2 checkpoint.dir=" + (folder_ / "c").string());
  for (const char* words : {"plan: ", "step 1/3  loss ", "\ntrained 3 steps in "})
    EXPECT_NE(alone.output.find(words), std::string::npos) << words << " in\n" << alone.output;
  const std::string checkpoint = (folder_ / "c/step-00000003").string();
  EXPECT_NE(alone.output.find("\ncheckpoint: " + checkpoint + "\nnext: zeroth export " + checkpoint +
                              " weights.safetensors\n"),
            std::string::npos)
      << alone.output;
  EXPECT_EQ(shell("export ZR_PROGRESS=off; " + steps).output, "");
  const Result terminal = shell("export ZR_PROGRESS=tty; " + steps);
  EXPECT_NE(terminal.output.find(" 3/3  100 %  loss "), std::string::npos) << terminal.output;
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[3], Json({{"step", 3}, {"val_loss", 1.5}})) << rows[3];
  EXPECT_EQ(summary()["val_loss"], 1.5);
}

}  // namespace
