// zr::Engine as a program changes it from C++: learning rate, accumulation; results of steps; lists. Gradients:
// gradient_edit_test.cpp.
#include "multirank/engine/printed_result.hpp"
#include "support/user_error.hpp"

namespace {

using namespace engine_tests;
using zr::test::user_error_of;

class EngineCustomizationTest : public PrintedResultTest {};

RANK_BODY(trains_and_prints_hash, Run) {
  run.build();
  run.train();
  print_hash(run);
}

// --- learning rates ---

RANK_BODY(sets_lr, Run) {
  run.build();
  run.engine->set_lr(0.05);
  run.train();
  EXPECT_EQ(run.engine->last_step().learning_rate, 0.05);
  print_hash(run);
}

RANK_BODY(sets_lr_between_micro_batches, Run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  EXPECT_FALSE(run.engine->step());
  run.engine->set_lr(0.05);
  run.train();
  print_hash(run);
}

RANK_BODY(sets_linear_schedule, Run) {
  run.build();
  const auto total = static_cast<double>(run.engine->steps());
  run.engine->set_schedule([total](int64_t index) { return 0.05 * (1 + (0.25 - 1) * (double(index) / total)); });
  run.train();
  print_hash(run);
}

RANK_BODY(sets_and_ends_schedule, Run) {
  run.build();
  run.engine->set_schedule([](int64_t) { return 7.0; });
  run.engine->set_schedule({});
  run.train();
  print_hash(run);
}

TEST_F(EngineCustomizationTest, SetLrReplacesTheConfiguredRate) {
  const std::string expected = result_of(2, trains_and_prints_hash, "optimizer.lr=0.05");
  EXPECT_NE(result_of(2, trains_and_prints_hash, "optimizer.lr=0.5"), expected);
  EXPECT_EQ(result_of(2, sets_lr, "optimizer.lr=0.5"), expected);
  EXPECT_EQ(result_of(1, sets_lr, "optimizer.lr=0.5 schedule.use=cosine train.gradient_accumulation=2"), expected);
}

TEST_F(EngineCustomizationTest, SetLrBetweenMicroBatchesAppliesToThatStep) {
  const std::string accumulates = "train.gradient_accumulation=2 optimizer.lr=";
  EXPECT_EQ(result_of(2, sets_lr_between_micro_batches, accumulates + "0.5"),
            result_of(2, trains_and_prints_hash, accumulates + "0.05"));
}

TEST_F(EngineCustomizationTest, ScheduleOfTheProgramEqualsTheSameBuiltInOne) {
  const std::string expected =
      result_of(2, trains_and_prints_hash,
                "train.steps=4 schedule.use=linear schedule.linear.warmup=0 schedule.linear.final_ratio=0.25");
  for (const std::string& strategy : kLayouts)
    EXPECT_EQ(result_of(2, sets_linear_schedule, "train.steps=4 optimizer.lr=0.5 " + strategy), expected) << strategy;
  EXPECT_EQ(result_of(2, sets_and_ends_schedule, "train.steps=4"),
            result_of(2, trains_and_prints_hash, "train.steps=4"));
}

// The rejected step can be repeated with a correct schedule, with the same result as without the rejection.
RANK_BODY(schedule_differs_between_ranks, Run) {
  run.build();
  run.engine->set_accumulation(1);
  const double own = run.engine->rank() == 0 ? 0.5 : 0.25;
  run.engine->set_schedule([own](int64_t index) { return index == 1 ? own : 0.05; });
  run.micro_step();
  run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
  EXPECT_EQ(user_error_of([&] { run.engine->step(); }),
            "engine.step(): the learning rate of update 1, which the program set, is 0.25 on rank 1 and 0.5 on rank 0; "
            "make the function passed to engine.set_schedule() depend only on the index of the update");
  EXPECT_EQ(run.engine->step_index(), 1);
  run.engine->set_lr(0.05);
  EXPECT_TRUE(run.engine->step());
  while (!run.engine->done()) run.micro_step();
  print_hash(run);
}

TEST_F(EngineCustomizationTest, RejectsAScheduleThatDiffersBetweenRanksWithoutChangingTheStep) {
  const std::string expected = result_of(2, trains_and_prints_hash, "");
  for (const std::string& strategy : kLayouts)
    EXPECT_EQ(result_of(2, schedule_differs_between_ranks, strategy), expected) << strategy;
}

MULTIRANK_TEST(EngineCustomizationTest, RejectsInvalidRates, {1, 2}) {
  run.build();
  EXPECT_EQ(user_error_of([&] { run.engine->set_lr(-1); }),
            "engine.set_lr(-1): a learning rate must be finite and at least 0");
  run.engine->set_schedule([](int64_t) { return std::numeric_limits<double>::quiet_NaN(); });
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  EXPECT_EQ(user_error_of([&] { run.engine->step(); }),
            "engine.step(): the learning rate of update 0, which the program set, is nan on rank 0, but it must be "
            "finite and at least 0; correct engine.set_lr() or engine.set_schedule()");
}

// --- accumulation ---

RANK_BODY(changes_accumulation, Run) {
  run.build();
  run.engine->set_accumulation(2);
  EXPECT_EQ(run.engine->accumulation(), 2);
  while (run.engine->step_index() < 2) run.micro_step();
  run.engine->set_accumulation(4);
  run.train();
  EXPECT_EQ(run.engine->samples(), (2 * 2 + 2 * 4) * run.engine->world() * run.engine->micro_batch());
  print_hash(run);
}

RANK_BODY(continues_with_four, Run) {  // the same, by two engines: the second resumes the checkpoint of the first
  run.build();
  while (run.engine->step_index() < 2) run.micro_step();
  run.engine->save(run.program.text("job.runs") + "-saved");
  run.engine.reset();
  std::vector<std::string> more(run.arguments.begin() + 1, run.arguments.end());
  more.emplace_back("train.gradient_accumulation=4");
  run.program = zr::Program(run.arguments[0], more,
                            {{"parity.model", "everything", "which model"},
                             {"parity.weighted", false, "unused"},
                             {"parity.overflows", false, "unused"}});
  run.build(9);
  run.engine->load(run.program.text("job.runs") + "-saved");
  run.train();
  print_hash(run);
}

TEST_F(EngineCustomizationTest, ChangedAccumulationEqualsRunsWithThatAccumulation) {
  const std::string steps = "train.steps=4 train.gradient_accumulation=";
  const std::string expected = result_of(2, continues_with_four, steps + "2");
  for (const std::string& strategy : kLayouts)
    EXPECT_EQ(result_of(2, changes_accumulation, steps + "3 " + strategy), expected) << strategy;
  EXPECT_EQ(result_of(2, changes_accumulation, steps + "3 strategy=zero2 gradients.overlap=false"), expected);
  const std::string last = " gradients.reduce=last_micro_step";  // another order of additions
  EXPECT_EQ(result_of(2, changes_accumulation, steps + "1 strategy=zero2" + last),
            result_of(2, continues_with_four, steps + "2" + last));
}

MULTIRANK_TEST(EngineCustomizationTest, RejectsAccumulationThatIsNotPossible, {2}) {
  run.build();
  EXPECT_THROW(run.engine->set_accumulation(0), zr::UserError);
  EXPECT_THROW(run.engine->set_accumulation(2), zr::UserError) << "the plan has no sums over micro-batches";
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  EXPECT_THROW(run.engine->set_accumulation(1), zr::UserError) << "within a step";
  run.engine->step();
  run.engine->set_accumulation(1);
}

// --- results and lists ---

MULTIRANK_TEST(EngineCustomizationTest, ReportsTheResultOfEveryStep, {1, 2},
               {"train.steps=4 parity.overflows=true schedule.use=linear schedule.linear.warmup=2"}) {
  run.build();
  std::vector<zr::StepResult> results;
  std::vector<std::string> order;
  run.engine->on_step([&](const zr::StepResult& result) {
    results.push_back(result);
    order.push_back("first");
    run.engine->get("twice.weight");  // a collective call of a callback
  });
  run.engine->on_step([&](const zr::StepResult&) { order.push_back("second"); });
  run.train();
  ASSERT_EQ(results.size(), 4u);
  EXPECT_EQ(order.size(), 8u);
  EXPECT_EQ(order[0], "first");
  EXPECT_EQ(order[1], "second");
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].step, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(results[i].skipped, i % 2 == 0) << i;
    EXPECT_EQ(std::isfinite(results[i].gradient_norm), i % 2 == 1) << i;
  }
  EXPECT_DOUBLE_EQ(results[1].learning_rate, 0.05 / 3) << "the first update";
  EXPECT_DOUBLE_EQ(results[3].learning_rate, 0.05 * 2 / 3) << "the second update";
  EXPECT_EQ(results[3].loss, run.engine->last_loss());
  EXPECT_EQ(run.engine->last_step().step, 4);
}

MULTIRANK_TEST(EngineCustomizationTest, StepPassesOnTheExceptionOfACallback, {1}) {
  run.build();
  run.engine->on_step([](const zr::StepResult& result) {
    if (result.step == 1) throw std::runtime_error("stop here");
  });
  run.engine->backward(run.model->loss(0, 0));
  EXPECT_THROW(run.engine->step(), std::runtime_error);
  EXPECT_EQ(run.engine->step_index(), 1);
  run.micro_step();
  EXPECT_EQ(run.engine->step_index(), 2);
}

MULTIRANK_TEST(EngineCustomizationTest, ListsParametersSlotsAndGroups, {2}, {"strategy=zero3", "strategy=zero0"}) {
  zr::Configuration config;
  config.set("strategy", "zero2").set("optimizer", "adamw").set("job.name", "lists");
  config.add_group({"*.bias", "1.*"}, {{"weight_decay", 0}, {"lr_scale", 0.5}});
  config.set("optimizer.sgd.momentum", 0.9).add_group({"0.weight"}, {{"weight_decay", 0.1}}, "sgd");
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  model->parameters()[2].requires_grad_(false);
  zr::Engine engine(zr::Program(config), *model, "lists");
  const std::vector<zr::ParameterInfo> list = engine.parameters();
  ASSERT_EQ(list.size(), 4u);
  EXPECT_EQ(list[0].name, "0.weight");
  EXPECT_EQ(list[0].shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(list[0].group, 2);
  EXPECT_EQ(list[1].name, "0.bias");
  EXPECT_EQ(list[1].group, 1);
  EXPECT_TRUE(list[1].trained);
  EXPECT_FALSE(list[2].trained);
  EXPECT_EQ(list[2].group, 1);
  EXPECT_EQ(engine.slots(), (std::vector<std::string>{"momentum_buffer", "exp_avg", "exp_avg_sq"}));
  const std::vector<zr::GroupInfo> groups = engine.groups();
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].match, (std::vector<std::string>{"*.bias", "1.*"}));
  EXPECT_EQ(groups[0].lr_scale, 0.5);
  ASSERT_EQ(groups[0].values.size(), 1u);
  EXPECT_EQ(groups[0].values[0].first, "weight_decay");
  EXPECT_EQ(groups[0].use, "");
  EXPECT_EQ(groups[1].use, "sgd");
}

RANK_BODY(keeps_settings_in_refresh, Run) {
  run.build();
  int64_t calls = 0;
  run.engine->set_lr(0.01);
  run.engine->set_accumulation(1);
  run.engine->edit_gradients([](const std::string&, torch::Tensor gradient, int64_t) { gradient.clamp_(-1e-3, 1e-3); });
  run.engine->on_step([&](const zr::StepResult&) { ++calls; });
  run.micro_step();
  run.model->named_parameters()["twice.weight"].requires_grad_(false);
  run.engine->refresh();
  EXPECT_EQ(run.engine->accumulation(), 1);
  run.micro_step();
  EXPECT_EQ(run.engine->last_step().learning_rate, 0.01);
  EXPECT_EQ(calls, 2);
  EXPECT_LE(run.engine->get("scalar", zr::TensorKind::gradient).abs().max().item<float>(), 1e-3f);
  print_hash(run);
}

TEST_F(EngineCustomizationTest, RefreshKeepsSettingsOfProgram) {
  result_of(2, keeps_settings_in_refresh, "train.gradient_accumulation=2 strategy=zero2");
}

}  // namespace
