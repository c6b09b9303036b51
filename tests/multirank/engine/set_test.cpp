// engine.set() of many values: when the strategy sends them, and what the program and the ranks see meanwhile.
#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>

#include "support/engine_test.hpp"
#include "support/layouts.hpp"

namespace {

using namespace engine_tests;

using testing::HasSubstr;

void halve_all(Run& run) {
  std::vector<std::pair<std::string, torch::Tensor>> halves;
  for (const auto& item : run.model->named_parameters())
    halves.emplace_back(item.key(), run.engine->get(item.key()) * 0.5);
  for (const auto& [name, half] : halves) run.engine->set(name, zr::TensorKind::value, half);
}

class EngineSetTest : public EngineTest {
 protected:
  // Gathers of weights in rank 0's trace of the last run.
  std::ptrdiff_t gathers() const {
    const Json trace = Json::parse(std::ifstream(folder_ / "run/latest/trace-0.json"));
    return std::ranges::count_if(trace, [](const Json& event) {
      return event.at("ph") == "X" && event.at("name").get<std::string>().starts_with("all_gather bucket");
    });
  }
};

RANK_BODY(trains_on, Run) {
  run.build();
  run.train();
}

RANK_BODY(halves_once, Run) {
  run.build();
  halve_all(run);
  run.train();
}

TEST_F(EngineSetTest, TheStrategySendsTheValuesOfManyCallsOnce) {
  for (const std::string how : {"strategy=zero1", "strategy=zero2"}) {
    const std::string options = how + " train.dtype=bf16 communicator.share_weights=false job.trace=true train.steps=";
    ASSERT_EQ(run(3, trains_on, options + "1").code, 0);
    const std::ptrdiff_t in_step = gathers();
    EXPECT_GT(in_step, 0) << how;
    ASSERT_EQ(run(3, halves_once, options + "1").code, 0);
    EXPECT_EQ(gathers(), 2 * in_step) << how;
    ASSERT_EQ(run(3, halves_once, options + "2").code, 0);
    EXPECT_EQ(gathers(), 3 * in_step) << how;
  }
}

// Sets values before a step, between backward and step, in an evaluation, and before the weights are hashed.
RANK_BODY(sets_anywhere, Run) {
  run.build();
  halve_all(run);
  run.micro_step();
  halve_all(run);
  const bool own_copies = run.program.text("strategy") == "zero2";
  for (const auto& item : run.model->named_parameters()) {
    const torch::Tensor set = run.engine->get(item.key());
    run.engine->set(item.key(), zr::TensorKind::value, set + 1);
    if (own_copies) {
      EXPECT_TRUE(same(item.value().to(torch::kFloat), (set + 1).to(item.value().scalar_type()).to(torch::kFloat)));
    }
    run.engine->set(item.key(), zr::TensorKind::value, set);
  }
  run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
  run.engine->set("twice.weight", zr::TensorKind::value, run.engine->get("twice.weight") * 3);
  run.engine->step();
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    run.engine->set("large.weight", zr::TensorKind::value, run.engine->get("large.weight") * 5);
  }
  run.micro_step();
  run.engine->set("scalar", zr::TensorKind::value, torch::full({}, 0.25));
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "all " << hash << "\n";
}

TEST_F(EngineSetTest, HasTheSameBitsForEveryLayout) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    std::string all;
    for (const std::string& layout : zr::test::kLayouts) {
      const Result result = run(3, sets_anywhere, layout + " train.steps=3 train.dtype=" + dtype);
      ASSERT_EQ(result.code, 0) << layout << "\n" << result.output;
      ASSERT_THAT(result.output, HasSubstr("all ")) << layout;
      const std::string line = result.output.substr(result.output.find("all "), 20);
      if (all.empty()) all = line;
      EXPECT_EQ(line, all) << layout << " " << dtype;
    }
  }
}

// Rank 1 alone writes to a weight after another one was set.
RANK_BODY(writes_after_set, Run) {
  run.build();
  run.engine->set("scalar", zr::TensorKind::value, torch::full({}, 0.25));
  const torch::NoGradGuard no_grad;
  if (run.engine->rank() == 1) run.model->named_parameters()["twice.weight"].fill_(0.5);
  const torch::AutoGradMode with_grad(true);
  run.train();
}

// Of the layouts, only that in which each rank has a copy of all weights.
TEST_F(EngineSetTest, AWriteOnOneRankAfterItIsFound) {
  const Result result = run(2, writes_after_set, zr::test::kLayouts.front());
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("weights differ between ranks: in 'twice.weight', elements 0 to 1295, rank 1 "
                                       "has different values than rank 0"));
}

}  // namespace
