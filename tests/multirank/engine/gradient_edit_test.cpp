// engine.edit_gradients(): what the function gets, when, and what its exceptions do.
#include "multirank/engine/printed_result.hpp"

namespace {

using namespace engine_tests;

class EngineGradientEditTest : public PrintedResultTest {};

RANK_BODY(trains_unedited, Run) {
  run.build();
  run.train();
  print_hash(run);
}

// One rank and one micro-batch: the edited gradient is libtorch's, so the weights equal those of plain libtorch.
MULTIRANK_TEST(EngineGradientEditTest, ClipsGradientsByValueLikePlainLibtorch, {1},
               {"parity.model=tiny", "parity.model=tiny gradients.overlap=false strategy=zero3",
                "parity.model=tiny strategy=zero1 train.gradient_clipping=0.001"}) {
  const double clip = run.program.number("train.gradient_clipping");
  const auto plain = parity::make("tiny", 7);
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.05).weight_decay(
                                                         run.program.number("optimizer.adamw.weight_decay")));
  run.build();
  run.engine->edit_gradients([](const std::string&, torch::Tensor gradient, int64_t) { gradient.clamp_(-0.01, 0.01); });
  while (!run.engine->done()) {
    optimizer.zero_grad();
    plain->loss(run.engine->step_index(), 0).backward();
    torch::nn::utils::clip_grad_value_(plain->parameters(), 0.01);
    if (clip > 0) torch::nn::utils::clip_grad_norm_(plain->parameters(), clip);
    optimizer.step();
    run.micro_step();
  }
  if (clip > 0) return;  // libtorch adds up the norm in another order
  for (const auto& entry : plain->named_parameters())
    EXPECT_TRUE(torch::equal(run.engine->get(entry.key()), entry.value())) << entry.key();
}

RANK_BODY(clips_by_value, Run) {
  run.build();
  run.engine->edit_gradients([](const std::string& parameter, torch::Tensor gradient, int64_t first) {
    EXPECT_NE(parameter, "unused") << "it has no gradient";
    gradient.clamp_(-0.002, 0.002);
    if (parameter == "twice.weight" && first <= 5 && 5 < first + gradient.numel()) gradient[5 - first] = 0.5;
  });
  run.train();
  const torch::Tensor gradient = run.engine->get("twice.weight", zr::TensorKind::gradient).flatten();
  EXPECT_EQ(gradient[5].item<float>(), 0.5f);
  EXPECT_LE(gradient.narrow(0, 6, gradient.numel() - 6).abs().max().item<float>(), 0.002f);
  print_hash(run);
}

TEST_F(EngineGradientEditTest, EditsGradientsEquallyUnderEveryStrategyAndSplit) {
  const std::string steps = "train.steps=4 ";
  fs::create_directories(folder_ / "swap");
  const std::string expected = result_of(2, clips_by_value, steps + "train.gradient_accumulation=2");
  EXPECT_NE(result_of(2, trains_unedited, steps + "train.gradient_accumulation=2"), expected);
  for (const std::string& strategy : kLayouts)
    EXPECT_EQ(result_of(2, clips_by_value, steps + "train.gradient_accumulation=2 " + strategy), expected) << strategy;
  EXPECT_EQ(result_of(1, clips_by_value, steps + "train.gradient_accumulation=4 strategy=zero2"), expected);
  EXPECT_EQ(result_of(4, clips_by_value, steps + "strategy=zero3"), expected);
  EXPECT_EQ(result_of(2, clips_by_value,
                      steps +
                          "train.gradient_accumulation=2 strategy=zero2 offload.optimizer=nvme "
                          "offload.gradients=nvme offload.nvme.path=" +
                          (folder_ / "swap").string()),
            expected);
}

RANK_BODY(sets_gradients_to_zero, Run) {
  run.build();
  run.engine->edit_gradients([](const std::string&, torch::Tensor gradient, int64_t) { gradient.zero_(); });
  run.train();
  print_hash(run);
}

// The largest gradient of this model is 2 without the loss scale, and 8000 with it.
RANK_BODY(edits_without_the_loss_scale, Run) {
  run.build();
  float largest = 0;
  run.engine->edit_gradients([&](const std::string&, const torch::Tensor& gradient, int64_t) {
    if (gradient.numel() > 0) largest = std::max(largest, gradient.abs().max().item<float>());
  });
  run.train();
  EXPECT_GT(run.engine->mean(largest), 0.01);
  EXPECT_LT(run.engine->mean(largest), 100);
}

TEST_F(EngineGradientEditTest, EditsGradientsOf16BitJobs) {
  const Result done = run(2, edits_without_the_loss_scale, "train.dtype=fp16 fp16.loss_scale=4096");
  EXPECT_EQ(done.code, 0) << done.output;
  const std::string zero = result_of(2, sets_gradients_to_zero, "");
  EXPECT_EQ(result_of(2, sets_gradients_to_zero, "gradients.dtype=bf16"), zero) << "what it writes to them counts";
  EXPECT_NE(result_of(2, trains_unedited, ""), zero);
}

struct OwnException : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Every rank learns of the failure; the step, made again without it, has the same result.
RANK_BODY(functions_throw, Run) {
  run.build();
  const int rank = run.engine->rank();
  const auto fails_on_rank_1 = [&](const std::string& function) {
    run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
    try {
      run.engine->step();
      ADD_FAILURE() << "no exception on rank " << rank;
    } catch (const OwnException& error) {
      EXPECT_EQ(rank, 1);
      EXPECT_STREQ(error.what(), "mine");
    } catch (const zr::PeerFailedError& error) {
      EXPECT_EQ(rank, 0);
      EXPECT_EQ(error.exit_code(), zr::exit_code::peer_lost);
      EXPECT_EQ(std::string(error.what())
                    .find("engine.step(): the function passed to engine." + function + "() failed on rank 1 "),
                0u)
          << error.what();
    }
  };
  run.micro_step();
  run.engine->edit_gradients([&](const std::string& parameter, torch::Tensor gradient, int64_t) {
    gradient.zero_();
    if (rank == 1 && parameter == "scalar") throw OwnException("mine");
    if (rank == 1 && parameter != "unused") gradient.fill_(7);
  });
  const bool updates_scalar = run.program.text("strategy") == "zero0";  // every rank edits every parameter
  if (updates_scalar) {
    fails_on_rank_1("edit_gradients");
    EXPECT_EQ(run.engine->step_index(), 1);
  }
  run.engine->edit_gradients({});
  run.engine->set_schedule([&](int64_t) -> double {
    if (rank == 1) throw OwnException("mine");
    return 0.05;
  });
  fails_on_rank_1("set_schedule");
  run.engine->set_lr(0.05);
  EXPECT_TRUE(run.engine->step());
  run.train();
  print_hash(run);
}

TEST_F(EngineGradientEditTest, ExceptionOfAFunctionOnOneRankDropsTheStepOnAll) {
  const std::string expected = result_of(2, trains_unedited, "");
  for (const std::string& strategy : kLayouts) EXPECT_EQ(result_of(2, functions_throw, strategy), expected) << strategy;
}

RANK_BODY(edits_nothing, Run) {
  run.build();
  run.engine->edit_gradients([](const std::string&, const torch::Tensor&, int64_t) {});
  run.train();
  print_hash(run);
}

RANK_BODY(ends_editing, Run) {
  run.build();
  run.engine->edit_gradients([](const std::string&, torch::Tensor gradient, int64_t) { gradient.zero_(); });
  run.engine->edit_gradients({});
  run.train();
  print_hash(run);
}

// With four micro-batches, averaging divides by a power of two and rounds nothing.
TEST_F(EngineGradientEditTest, EditThatChangesNothingGivesTheSameBits) {
  for (const std::string& strategy : kLayouts) {
    const std::string how = "train.gradient_accumulation=2 train.gradient_clipping=0.5 " + strategy;
    EXPECT_EQ(result_of(2, edits_nothing, how), result_of(2, trains_unedited, how)) << strategy;
  }
  EXPECT_EQ(result_of(3, ends_editing, ""), result_of(3, trains_unedited, ""));
}

MULTIRANK_TEST(EngineGradientEditTest, EditDoesNotHideAnOverflow, {2},
               {"parity.overflows=true train.steps=4", "parity.overflows=true train.steps=4 strategy=zero3",
                "parity.overflows=true train.steps=4 train.dtype=fp16 fp16.initial_scale_power=8 strategy=zero2"}) {
  run.build();
  run.engine->edit_gradients(
      [](const std::string&, torch::Tensor gradient, int64_t) { gradient.nan_to_num_(0, 1, -1).clamp_(-1, 1); });
  std::vector<bool> skipped;
  run.engine->on_step([&](const zr::StepResult& result) { skipped.push_back(result.skipped); });
  run.train();
  EXPECT_EQ(skipped, (std::vector<bool>{true, false, true, false}));
}

}  // namespace
