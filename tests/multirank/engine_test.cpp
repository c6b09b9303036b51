// zr::Engine through its public API, with real ranks, plug-ins and files.
#include "multirank/engine_fixture.hpp"

namespace {

using namespace engine_tests;

TEST_F(EngineTest, StartsFromRankZeroParameters) {
  const Result result = run(3, "takes_rank_zero", "strategy=zero1");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(EngineTest, GetsAndSetsFullTensorsUnderEveryStrategy) {
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3", "dealt"})
    for (const char* dtype : {"fp32", "bf16", "fp16 fp16.initial_scale_power=8", "bf16 gradients.dtype=bf16"}) {
      const Result result = run(3, "gets_and_sets", std::string("strategy=") + strategy + " train.dtype=" + dtype);
      EXPECT_EQ(result.code, 0) << strategy << " " << dtype << "\n" << result.output;
    }
}

TEST_F(EngineTest, ReturnsSameBitsUnderEveryStrategy) {
  for (const char* dtype : {"fp32", "bf16", "fp16 fp16.initial_scale_power=8", "fp16 gradients.dtype=bf16"}) {
    std::string all;
    for (const char* strategy : {"zero0", "zero1", "zero2", "zero3", "dealt"}) {
      const Result result = run(3, "tells_all", std::string("strategy=") + strategy + " train.dtype=" + dtype);
      ASSERT_EQ(result.code, 0) << result.output;
      ASSERT_NE(result.output.find("all "), std::string::npos) << result.output;
      const std::string line = result.output.substr(result.output.find("all "));  // zero3 may log lines before it
      if (all.empty()) all = line;
      EXPECT_EQ(line, all) << strategy << " " << dtype;
    }
  }
}

TEST_F(EngineTest, ParameterGroupsUseTheirOwnHyperparameters) {
  extend(
      "\n[[optimizer.groups]]\nmatch = [\"*.bias\"]\nlr_scale = 0.5\nweight_decay = 0.0\n"
      "[[optimizer.groups]]\nmatch = [\"embedding.*\", \"*.bias\"]\nlr_scale = 0.25\n");
  for (const char* strategy : {"zero0", "zero1", "zero2"}) {
    const Result result =
        run(2, "groups",
            "optimizer=sgd optimizer.sgd.momentum=0.0 optimizer.sgd.nesterov=false strategy=" + std::string(strategy));
    EXPECT_EQ(result.code, 0) << result.output;
  }
}

TEST_F(EngineTest, RejectsGroupPatternThatMatchesNothing) {
  extend("\n[[optimizer.groups]]\nmatch = [\"twice.wieght\"]\nlr_scale = 0.5\n");
  const Result result = run(1, "trains");
  EXPECT_EQ(result.code, 2);
  EXPECT_NE(result.output.find("optimizer group pattern 'twice.wieght' matches no parameter; the nearest is "
                               "'twice.weight'; `*` matches any sequence of characters"),
            std::string::npos)
      << result.output;
}

TEST_F(EngineTest, SkippedStepChangesNoState) {
  for (const char* dtype : {"fp32", "bf16", "fp16 fp16.initial_scale_power=8"}) {
    const Result result = run(2, "skips_without_trace",
                              "strategy=zero1 train.steps=9 schedule.use=linear schedule.linear.warmup=4 "
                              "optimizer.lr=0.1 train.dtype=" +
                                  std::string(dtype));
    EXPECT_EQ(result.code, 0) << dtype << "\n" << result.output;
  }
}

TEST_F(EngineTest, ReportsLossScalePerStep) {
  ASSERT_EQ(run(2, "trains",
                "train.dtype=fp16 train.steps=4 parity.overflows=true fp16.initial_scale_power=8 fp16.hysteresis=1")
                .code,
            0);
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 4u);
  const std::vector<double> scales{256, 128, 128, 64};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["loss_scale"], scales[i]) << i;
    EXPECT_EQ(rows[i].contains("skipped"), i % 2 == 0) << i;
  }
  EXPECT_EQ(summary()["skipped"], 2);
  EXPECT_EQ(summary()["loss_scale"], 64);
  ASSERT_EQ(run(2, "trains", "train.steps=1").code, 0);
  EXPECT_FALSE(metrics()[0].contains("loss_scale")) << "fp32 has no loss scale";
}

TEST_F(EngineTest, StopsAfterTooManySkippedStepsAndNamesParameterAndRank) {
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
    for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
      const Result result =
          run(3, "never_finite",
              "train.steps=50 train.max_skipped_steps=3 fp16.initial_scale_power=8 train.dtype=" + dtype +
                  " strategy=" + strategy);
      EXPECT_EQ(result.code, 2) << result.output;
      const std::string says =
          "gradients were not finite in 3 steps in a row, as many as train.max_skipped_steps (command line) allows: "
          "'scalar' "
          "was the first parameter that overflowed, on rank 2; the loss of rank 2 was not finite either; the weights "
          "are those after step 2" +
          std::string(dtype == "fp16" ? ", and the loss scale is 64" : "") +
          "; check the data of that rank, lower optimizer.lr or set train.gradient_clipping" +
          (dtype == "fp16" ? ", or set train.dtype = \"bf16\", which has the range of fp32" : "");
      EXPECT_NE(result.output.find(says), std::string::npos) << dtype << "\n" << result.output;
      EXPECT_EQ(metrics().size(), 5u) << "metrics must have a row for every step, skipped or not";
    }
}

TEST_F(EngineTest, NamesRankWhenOneSkippedStepIsAllowed) {
  const Result result = run(2, "never_finite", "train.steps=50 train.max_skipped_steps=1");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_NE(result.output.find("'scalar' was the first parameter that overflowed, on rank 1;"), std::string::npos)
      << result.output;
}

TEST_F(EngineTest, DistinguishesOverflowedSumFromOverflowedGradients) {
  const Result result = run(2, "sum_not_finite", "train.steps=50 train.max_skipped_steps=2");
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_NE(result.output.find("allows: 'scalar' was the first parameter whose sum over ranks and micro-batches "
                               "overflowed, although no rank's own gradient did; the weights"),
            std::string::npos)
      << result.output;
}

TEST_F(EngineTest, SkippedStepDoesNotAdvanceSchedule) {
  ASSERT_EQ(run(1, "trains", "train.steps=6 schedule.use=linear schedule.linear.warmup=3 optimizer.lr=1.0").code, 0);
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 6u);
  const std::vector<double> climb{0.25, 0.5, 0.75, 1};
  for (std::size_t i = 0; i < climb.size(); ++i) EXPECT_EQ(rows[i]["lr"], climb[i]) << i;
  for (std::size_t i = 4; i < rows.size(); ++i) EXPECT_LT(rows[i]["lr"], rows[i - 1]["lr"]) << i;
  ASSERT_EQ(
      run(1, "skips_non_finite", "train.steps=6 schedule.use=linear schedule.linear.warmup=3 optimizer.lr=1.0").code,
      0);
  const auto skipped = metrics();
  EXPECT_EQ(skipped[0]["lr"], 0.25);
  EXPECT_EQ(skipped[1]["lr"], 0.5);
  EXPECT_EQ(skipped[2]["lr"], 0.5) << "the skipped step must not advance the schedule";
}

TEST_F(EngineTest, NestedBackwardRequiresOverlapOff) {
  const Result rejected = run(2, "backward_in_backward");
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  EXPECT_NE(rejected.output.find("'line.weight' received a second gradient in one backward after its first was handed "
                                 "to the strategy: a backward() ran inside this backward; set gradients.overlap = "
                                 "false"),
            std::string::npos)
      << rejected.output;
  const Result waits = run(1, "backward_in_backward", "gradients.overlap=false");
  EXPECT_EQ(waits.code, 0) << waits.output;
}

TEST_F(EngineTest, ChoosesThreadsFromConfigThenLauncherThenCores) {
  const std::string launch = ZR_BUILD_DIR "/bin/zeroth launch -n 1 -t 3 -- ";
  EXPECT_NE(shell(launch + program(1, "tells_threads", "job.threads=0")).output.find("threads 3\n"), std::string::npos);
  EXPECT_NE(shell(launch + program(1, "tells_threads", "job.threads=2")).output.find("threads 2\n"), std::string::npos);
  EXPECT_NE(shell("taskset -c 0 " + program(1, "tells_threads", "job.threads=0")).output.find("threads 1\n"),
            std::string::npos)
      << "a process on one core must use one thread";
}

TEST_F(EngineTest, RejectsPluginThatNeedsUnsupportedFeature) {
  const Result weights = run(2, "trains", "strategy=halves");
  EXPECT_EQ(weights.code, 2);
  EXPECT_NE(weights.output.find("strategy 'halves' does not keep all of 'embedding.weight' on rank 0 and cannot "
                                "gather it before its use; choose another strategy"),
            std::string::npos)
      << weights.output;
  const Result blocks = run(2, "trains", "optimizer=blocks");
  EXPECT_EQ(blocks.code, 2);
  EXPECT_NE(
      blocks.output.find("optimizer 'blocks' with strategy 'zero0': its state 'scale' is not a sharded state with "
                         "one element per parameter element, the only kind that Zeroth supports; choose another "
                         "optimizer"),
      std::string::npos)
      << blocks.output;
}

TEST_F(EngineTest, RejectsStrategyWithoutBufferForDeferredGradients) {
  const std::string words = "strategy=cramped train.gradient_accumulation=2";
  const Result each = run(2, "trains", words);
  EXPECT_EQ(each.code, 0) << "gradients that are reduced in each micro-step must fit\n" << each.output;
  const Result deferred = run(2, "trains", words + " gradients.reduce=last_micro_step");
  EXPECT_EQ(deferred.code, 2);
  EXPECT_NE(deferred.output.find("strategy 'cramped' has no buffer to hold the gradient of '"), std::string::npos)
      << deferred.output;
  EXPECT_NE(deferred.output.find(
                "' across micro-steps, which gradients.reduce = \"last_micro_step\" requires; set gradients.reduce = "
                "\"each_micro_step\", or choose another strategy"),
            std::string::npos)
      << deferred.output;
}

TEST_F(EngineTest, FailsWhenMetricsCannotBeWritten) {
  fs::create_directories(folder_ / "run" / "metrics.jsonl");
  const Result result = run(2, "trains");
  EXPECT_EQ(result.code, 3) << result.output;
  EXPECT_NE(result.output.find((folder_ / "run" / "metrics.jsonl").string() +
                               ": cannot be made a symbolic link: Is a directory; check that the folder"),
            std::string::npos)
      << result.output;
}

TEST_F(EngineTest, TwoEnginesTrainInOneProcess) {
  const Result result = run(2, "two_at_once", "strategy=zero1 train.steps=50");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(EngineTest, AllRanksSkipStepWithNonFiniteGradients) {
  for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"})
    for (const char* dtype : {"fp32", "bf16", "fp16 fp16.initial_scale_power=8"}) {
      const Result result =
          run(2, "skips_non_finite", std::string("train.steps=5 strategy=") + strategy + " train.dtype=" + dtype);
      EXPECT_EQ(result.code, 0) << dtype << "\n" << result.output;
      const auto rows = metrics();
      ASSERT_EQ(rows.size(), 3u);
      EXPECT_TRUE(rows[1].contains("skipped"));
      EXPECT_FALSE(rows[2].contains("skipped"));
    }
}

TEST_F(EngineTest, WritesNullForNonFiniteValues) {
  const Result result = run(2, "never_finite", "train.steps=3");
  ASSERT_EQ(result.code, 0) << result.output;
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 3u);
  for (const Json& row : rows)
    for (const auto& [name, value] : row.items())
      EXPECT_TRUE(value.is_number() || value.is_null() || (name == "skipped" && value == true)) << row;
  for (const char* name : {"loss", "grad_norm"}) {
    EXPECT_TRUE(rows[1][name].is_number()) << rows[1];
    EXPECT_TRUE(rows[2][name].is_null()) << rows[2];
  }
  EXPECT_EQ(rows[2]["skipped"], true);
  EXPECT_TRUE(summary().contains("loss") && summary()["loss"].is_null()) << summary();
}

TEST_F(EngineTest, DoesNotUpdateUnusedParameter) {
  const Result result = run(2, "keeps_untouched", "strategy=zero1");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(EngineTest, EvaluationPreservesRandomState) {
  const Result result = run(2, "evaluates", "strategy=zero1");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(EngineTest, MatchesLibtorchAdamW) {
  const Result result =
      run(1, "follows_torch_adamw", "strategy=zero0 parity.model=recurrent train.steps=20 optimizer.lr=0.001");
  EXPECT_EQ(result.code, 0) << result.output;
}

TEST_F(EngineTest, NamesRankThatRunsOutOfData) {
  const Result result = run(2, "ends_early", "strategy=zero1 train.steps=50");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_NE(result.output.find("rank 1"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("after step 2"), std::string::npos) << result.output;
  const Result first = run(3, "ends_early_first", "strategy=zero1 train.steps=50");
  EXPECT_EQ(first.code, 4) << first.output;
  EXPECT_NE(first.output.find("rank 0 ended after step 2 (ran out of data?)"), std::string::npos) << first.output;
  const Result inside = run(2, "ends_early_inside", "strategy=zero1 train.steps=50 train.gradient_accumulation=2");
  EXPECT_EQ(inside.code, 4) << inside.output;
  EXPECT_NE(inside.output.find("rank 1 ended after step 2 (ran out of data?)"), std::string::npos) << inside.output;
}

TEST_F(EngineTest, WritesSummaryWhenAllRanksFinishEarly) {
  const Result result = run(2, "finishes", "strategy=zero1 train.steps=50");
  ASSERT_EQ(result.code, 0) << result.output;
  const Json s = summary();
  EXPECT_EQ(s["steps"], 2);
  EXPECT_EQ(s["weights_hash"].get<std::string>().size(), 16u);
  EXPECT_GT(s["communication_bytes"]["reduce_scatter"], 0);
}

TEST_F(EngineTest, NamesRankThatFailedWithException) {
  const Result launched = run(2, "fails_alone", "strategy=zero1 train.steps=50");
  EXPECT_EQ(launched.code, 1) << launched.output;
  EXPECT_NE(launched.output.find("the data of this rank is corrupt"), std::string::npos) << launched.output;
  // Without the launcher no process sees the exit code, so the failed rank must notify the survivors.
  const std::string start = "export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29653; ";
  const std::string rank = program(2, "fails_alone", "strategy=zero1 train.steps=50 job.threads=1");
  const Result survivor =
      shell(start + "(RANK=1 LOCAL_RANK=1 " + rank + " > /dev/null 2>&1 &) ; RANK=0 LOCAL_RANK=0 " + rank);
  EXPECT_EQ(survivor.code, 4) << survivor.output;
  EXPECT_NE(survivor.output.find("rank 1 ended by an exception after step 1"), std::string::npos) << survivor.output;
}

TEST_F(EngineTest, TrainsIdenticalWeightsUnderEveryStrategyAndWhenRepeated) {
  std::string hash;
  for (const char* how : {"strategy=zero0", "strategy=zero1", "strategy=zero2", "strategy=dealt", "strategy=zero1"}) {
    const Result result =
        run(2, "trains", std::string("train.steps=4 train.gradient_accumulation=2 parity.model=dropout ") + how);
    ASSERT_EQ(result.code, 0) << result.output;
    if (hash.empty()) hash = summary()["weights_hash"];
    EXPECT_EQ(summary()["weights_hash"], hash) << how;
  }
  EXPECT_EQ(hash.size(), 16u);
}

TEST_F(EngineTest, WritesRunFolder) {
  const Result result = run(2, "trains", "train.steps=3 strategy=zero1 communicator.share_weights=false");
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
  ASSERT_EQ(run(2, "trains").code, 0);
  EXPECT_EQ(summary()["weights_hash"], hash);
}

TEST_F(EngineTest, WritesMeanLossAndShortestNumbers) {
  ASSERT_EQ(run(2, "tells_losses", "train.steps=2 train.gradient_accumulation=2").code, 0);
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
  std::ifstream in(folder_ / "run" / "metrics.jsonl");
  std::string text;
  std::getline(in, text);
  const auto at = text.find("\"loss\": ") + 8;
  char shortest[32];
  const auto end = std::to_chars(shortest, shortest + sizeof shortest, rows[0]["loss"].get<double>()).ptr;
  EXPECT_EQ(text.substr(at, text.find(',', at) - at), std::string(shortest, end));
}

TEST_F(EngineTest, ShowsProgressAsLinesOrOnOneTerminalLine) {
  const std::string launch = ZR_BUILD_DIR "/bin/zeroth launch -n 1 -- ";
  const std::string steps = program(1, "validates", "train.steps=3");
  const Result plain = shell("export ZR_PROGRESS=plain; " + launch + steps);
  ASSERT_EQ(plain.code, 0) << plain.output;
  for (const char* words : {"step 1/3  loss ", "  lr 5.00e-02  ", " tokens/s  left ", "  memory device ",
                            "  waits: compute ", "step 3/3  validation loss 1.5000"})
    EXPECT_NE(plain.output.find(words), std::string::npos) << words << " in\n" << plain.output;
  EXPECT_EQ(plain.output.find('\r'), std::string::npos) << plain.output;
  const Result terminal = shell("export ZR_PROGRESS=tty; " + steps);
  EXPECT_NE(terminal.output.find(" 3/3  100 %  loss "), std::string::npos) << terminal.output;
  const auto rows = metrics();
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[3], Json({{"step", 3}, {"val_loss", 1.5}})) << rows[3];
  EXPECT_EQ(summary()["val_loss"], 1.5);
}

TEST_F(EngineTest, ReportsProgramErrorsWithRemedy) { check_messages("engine_errors.txt", 8); }

TEST_F(EngineTest, ReportsActivationThatDiskCannotReadOrWrite) {
  fs::create_directories(folder_ / "swap");
  const auto trained = [&](const std::string& fault) {
    return shell("ZR_TIER_FAULT=" + fault + " " ZR_BUILD_DIR "/bin/zeroth launch -n 2 -- " +
                 program(2, "trains",
                         "job.threads=1 strategy=zero1 offload.activation_bytes=1B offload.nvme.depth=1 "
                         "offload.activations=" ZR_BUILD_DIR "/tests/plugins/failing/zr_offload_nvme.so "
                         "offload.nvme.path=" +
                             (folder_ / "swap").string()));
  };
  const Result intact = trained("none");
  ASSERT_EQ(intact.code, 0) << intact.output;
  const Result read = trained("read=EIO@9"), write = trained("write=EIO@9");
  for (const auto& [result, what] : {std::pair{&read, "reading"}, std::pair{&write, "writing"}}) {
    EXPECT_EQ(result->code, 3) << result->output;
    for (const std::string& part :
         {std::string("offload 'nvme' ("), std::string("an activation of "), std::string(" (offload.activations): "),
          "tier nvme: " + (folder_ / "swap").string() + " (unnamed file): " + what + " ",
          std::string(" failed: Input/output error; the disk may be failing")})
      EXPECT_NE(result->output.find(part), std::string::npos) << part << "\n" << result->output;
  }
}

}  // namespace
