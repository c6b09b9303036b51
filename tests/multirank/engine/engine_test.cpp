// zr::Engine through its public API, with real ranks, plug-ins and files.
#include "support/engine_test.hpp"

#include <set>

#include "support/layouts.hpp"

namespace {

using namespace engine_tests;

MULTIRANK_TEST(EngineTest, StartsFromRankZeroParameters, {3}, {"strategy=zero1"}) {
  run.model = parity::make(run.program.text("parity.model"), 7 + static_cast<uint64_t>(run.program.rank()));
  auto mean = run.model->named_buffers()["batch_norm.running_mean"];
  mean.fill_(3 + run.program.rank());
  run.engine = std::make_unique<zr::Engine>(run.program, *run.model);
  EXPECT_TRUE(mean.eq(3).all().item<bool>()) << "the model has rank 0's buffers";
  const auto expected = parity::make(run.program.text("parity.model"), 7);
  for (const auto& item : expected->named_parameters())
    EXPECT_TRUE(same(run.engine->get(item.key()), item.value())) << "get(" + item.key() + ") returns rank 0's value";
  for (const auto& item : expected->named_parameters())
    EXPECT_TRUE(same(run.model->named_parameters()[item.key()], item.value()))
        << "the model's " + item.key() + " has rank 0's value";
}

MULTIRANK_TEST(EngineTest, GetsAndSetsFullTensors, {3},
               zr::test::combine({zr::test::kLayouts, {"train.dtype=fp32", "train.dtype=bf16 gradients.dtype=bf16"}})) {
  run.build();
  run.micro_step();
  const auto moment = run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg");
  const auto gradient = run.engine->get("twice.weight", zr::TensorKind::gradient);
  EXPECT_TRUE(torch::allclose(moment, gradient * 0.1, 1e-5, 1e-9))
      << "after one step the first moment is a tenth of the gradient";
  EXPECT_EQ(gradient.sizes(), torch::IntArrayRef({parity::kWidth, parity::kWidth}))
      << "a gradient has the parameter's shape";
  const auto value =
      torch::arange(parity::kWidth * parity::kWidth, torch::kFloat).view({parity::kWidth, parity::kWidth}) / 7;
  run.engine->set("twice.weight", zr::TensorKind::value, value);
  EXPECT_TRUE(same(run.engine->get("twice.weight"), value)) << "get() returns the value that was set";
  EXPECT_TRUE(same(run.model->named_parameters()["twice.weight"].to(torch::kFloat),
                   value.to(run.model->named_parameters()["twice.weight"].scalar_type()).to(torch::kFloat)))
      << "the model computes with the value that was set";
  run.engine->set("twice.weight", zr::TensorKind::state, value * 2, "exp_avg_sq");
  EXPECT_TRUE(same(run.engine->get("twice.weight", zr::TensorKind::state, "exp_avg_sq"), value * 2))
      << "get() returns the state that was set";
  EXPECT_TRUE(same(run.engine->get("head.weight"), run.engine->get("embedding.weight")))
      << "a tied weight has two names and one value";
}

// Prints one hash of everything that get() returns after two steps.
RANK_BODY(hashes_all, Run) {
  run.build();
  while (run.engine->step_index() < 2) run.micro_step();
  std::string bytes;
  const auto add = [&](const torch::Tensor& t) {
    bytes.append(static_cast<const char*>(t.data_ptr()), static_cast<std::size_t>(t.numel()) * 4);
  };
  for (const auto& item : run.model->named_parameters()) {
    add(run.engine->get(item.key()));
    if (!item.value().requires_grad()) continue;
    add(run.engine->get(item.key(), zr::TensorKind::gradient));
    for (const char* slot : {"exp_avg", "exp_avg_sq"}) add(run.engine->get(item.key(), zr::TensorKind::state, slot));
  }
  if (run.engine->rank() == 0) std::cout << "all " << bytes.size() << " " << std::hash<std::string>()(bytes) << "\n";
}

TEST_F(EngineTest, ReturnsSameBitsForEveryLayout) {
  for (const char* dtype : {"fp32", "fp16 gradients.dtype=bf16"}) {
    std::string all;
    for (const std::string& layout : zr::test::kLayouts) {
      const Result result = run(3, hashes_all, layout + " train.dtype=" + dtype);
      ASSERT_EQ(result.code, 0) << result.output;
      ASSERT_NE(result.output.find("all "), std::string::npos) << result.output;
      const std::string line = result.output.substr(result.output.find("all "));  // zero3 may log lines before it
      if (all.empty()) all = line;
      EXPECT_EQ(line, all) << layout << " " << dtype;
    }
  }
}

// One step of plain SGD: every parameter is updated with its group's learning rate and weight decay, bit-exactly.
RANK_BODY(groups, Run) {
  run.build();
  std::map<std::string, torch::Tensor> before;
  for (const auto& item : run.model->named_parameters()) before[item.key()] = run.engine->get(item.key()).clone();
  run.micro_step();
  const double lr = run.program.number("optimizer.lr");
  for (const auto& [name, old] : before) {
    if (!run.model->named_parameters()[name].requires_grad() || name == "unused" || name == "head.weight") continue;
    const bool bias = name.size() > 5 && name.substr(name.size() - 5) == ".bias", tied = name == "embedding.weight";
    auto gradient = run.engine->get(name, zr::TensorKind::gradient);
    if (!bias) gradient = gradient + old * 0.1;  // optimizer.sgd.weight_decay; the group of biases sets 0
    EXPECT_TRUE(same(run.engine->get(name), old - gradient * static_cast<float>(lr * (bias   ? 0.5
                                                                                      : tied ? 0.25
                                                                                             : 1.0))))
        << name + " is updated with its group's learning rate and weight decay";
  }
}

TEST_F(EngineTest, ParameterGroupsUseTheirOwnHyperparameters) {
  extend(
      "\n[[optimizer.groups]]\nmatch = [\"*.bias\"]\nlr_scale = 0.5\nweight_decay = 0.0\n"
      "[[optimizer.groups]]\nmatch = [\"embedding.*\", \"*.bias\"]\nlr_scale = 0.25\n");
  for (const std::string& layout : zr::test::kLayouts) {
    const Result result =
        run(2, groups, "optimizer=sgd optimizer.sgd.momentum=0.0 optimizer.sgd.nesterov=false " + layout);
    EXPECT_EQ(result.code, 0) << layout << "\n" << result.output;
  }
}

TEST_F(EngineTest, RejectsGroupPatternThatMatchesNothing) {
  extend("\n[[optimizer.groups]]\nmatch = [\"twice.wieght\"]\nlr_scale = 0.5\n");
  const Result result = run(1, trains);
  EXPECT_EQ(result.code, 2);
  EXPECT_NE(result.output.find("optimizer group pattern 'twice.wieght' matches no parameter; the nearest is "
                               "'twice.weight'; `*` matches any sequence of characters"),
            std::string::npos)
      << result.output;
}

// Trains two models with two Engines at the same time.
MULTIRANK_TEST(EngineTest, TwoEnginesTrainInOneProcess, {2}, {"strategy=zero1 train.steps=50"}) {
  run.build();
  auto overrides = std::vector<std::string>(run.arguments.begin() + 1, run.arguments.end());
  overrides.insert(overrides.end(), {"job.name=second", "strategy=zero0"});
  Run second(run.arguments[0], overrides);
  second.build();
  for (int i = 0; i < 3; ++i) {
    run.micro_step();
    second.micro_step();
  }
  EXPECT_EQ(run.engine->weights_hash(), second.engine->weights_hash()) << "two Engines do not affect each other";
  run.engine.reset();
  second.micro_step();
  EXPECT_EQ(second.engine->step_index(), 4) << "one Engine continues after the other is destroyed";
}

MULTIRANK_TEST(EngineTest, DoesNotUpdateUnusedParameter, {2}, {"strategy=zero1"}) {
  run.build();
  const auto before = run.engine->get("unused");
  run.train();
  EXPECT_TRUE(same(run.engine->get("unused"), before))
      << "weight decay does not change a parameter that no micro-batch used";
}

MULTIRANK_TEST(EngineTest, EvaluationPreservesRandomState, {2}, {"strategy=zero1"}) {
  run.build();
  run.micro_step();
  const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    EXPECT_FALSE(torch::GradMode::is_enabled()) << "gradients are off in evaluation";
    torch::rand({17});
  }
  EXPECT_TRUE(torch::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), state))
      << "evaluation restores the random state";
  EXPECT_EQ(run.engine->mean(run.engine->rank()), (run.engine->world() - 1) / 2.0) << "mean() averages over ranks";
}

// Compares twenty steps of AdamW on one rank with torch::optim::AdamW.
MULTIRANK_TEST(EngineTest, MatchesLibtorchAdamW, {1},
               {"strategy=zero0 parity.model=recurrent train.steps=20 optimizer.lr=0.001"}) {
  run.build();
  const auto twin = parity::make(run.program.text("parity.model"), 7);
  std::vector<torch::Tensor> parameters;
  for (const auto& p : twin->parameters())
    if (p.requires_grad()) parameters.push_back(p);
  torch::optim::AdamW adamw(parameters,
                            torch::optim::AdamWOptions(run.program.number("optimizer.lr")).weight_decay(0.01));
  for (int64_t step = 0; step < run.engine->steps(); ++step) {
    adamw.zero_grad();
    twin->loss(step, 0).backward();
    adamw.step();
    run.micro_step();
  }
  double largest = 0, difference = 0;
  for (const auto& item : twin->named_parameters()) {
    largest = std::max(largest, item.value().abs().max().item<double>());
    difference = std::max(difference, (item.value() - run.engine->get(item.key())).abs().max().item<double>());
  }
  std::cout << "after " << run.engine->steps()
            << " steps: largest difference / largest weight = " << difference / largest << std::endl;
  EXPECT_LE(difference, 1e-6 * largest)
      << "AdamW differs from torch::optim::AdamW by at most 1e-6 of the largest weight";
}

// weights_hash() reads shards of more than 65536 elements in parts.
TEST_F(EngineTest, HashesLargeShardsAsWholeWeights) {
  std::set<std::string> hashes;
  for (const std::string& layout : zr::test::kLayouts) {
    const Result result = run(2, trains, "train.steps=1 parity.model=millions " + layout);
    ASSERT_EQ(result.code, 0) << result.output;
    hashes.insert(summary()["weights_hash"]);
  }
  EXPECT_EQ(hashes.size(), 1u);
}

TEST_F(EngineTest, TrainsIdenticalWeightsWhenRepeated) {
  std::string hash;
  for (int repetition = 0; repetition < 2; ++repetition) {
    const Result result = run(2, trains, "train.steps=4 train.gradient_accumulation=2 parity.model=dropout");
    ASSERT_EQ(result.code, 0) << result.output;
    if (hash.empty()) hash = summary()["weights_hash"];
    EXPECT_EQ(summary()["weights_hash"], hash) << repetition;
  }
  EXPECT_EQ(hash.size(), 16u);
}

}  // namespace
