// A backward that the program runs by itself: no gradient counts, also if its error is caught.
#include <gmock/gmock.h>

#include <functional>
#include <map>

#include "support/engine_test.hpp"
#include "support/layouts.hpp"
#include "zr/swap.hpp"

namespace {

using namespace engine_tests;

class ProgramBackwardTest : public EngineTest {};

// When the program calls loss.backward(), and what it catches. The engine's own backward follows.
enum class When { never, first_of_all, before_each, within_a_step };

void train(Run& run, When when) {
  run.build();
  const auto by_itself = [&](const torch::Tensor& loss) {
    EXPECT_ANY_THROW(loss.backward({}, true));
    EXPECT_ANY_THROW(torch::autograd::backward({loss}, {}, true));
  };
  while (!run.engine->done()) {
    const int64_t step = run.engine->step_index(), micro = run.engine->micro_index();
    const torch::Tensor loss = run.model->loss(step, micro);
    const bool first = step == 0 && micro < run.engine->world();
    if (when == When::before_each || (when == When::first_of_all && first) || (when == When::within_a_step && !first))
      by_itself(loss);
    run.engine->backward(loss);
    run.engine->step();
  }
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "hash " << hash << " loss " << run.engine->last_loss() << std::endl;
}

RANK_BODY(trains_alone, Run) { train(run, When::never); }
RANK_BODY(backward_first_of_all, Run) { train(run, When::first_of_all); }
RANK_BODY(backward_before_each, Run) { train(run, When::before_each); }
RANK_BODY(backward_within_a_step, Run) { train(run, When::within_a_step); }

TEST_F(ProgramBackwardTest, NeverCountsTwice) {
  const auto expect_no_effect = [&](const std::vector<zr::test::RankBody>& bodies, const std::string& how) {
    const std::string options = "train.steps=2 " + how, expected = run(2, trains_alone, options).output;
    EXPECT_NE(expected.find("hash "), expected.npos) << expected;
    for (const zr::test::RankBody& body : bodies)
      EXPECT_EQ(run(2, body, options).output, expected) << body.name() << " " << how;
  };
  for (const std::string& layout : zr::test::kLayouts)
    expect_no_effect({backward_before_each, backward_first_of_all, backward_within_a_step}, layout);
  for (const std::string how : {"strategy=zero2 train.dtype=bf16", "strategy=zero2 gradients.reduce=last_micro_step",
                                "strategy=zero1 train.gradient_accumulation=3"})
    expect_no_effect({backward_before_each}, how);
}

// backward() of another engine that fails before it has delivered a gradient of its own can be repeated.
RANK_BODY(other_engine, Run) {
  const bool mistakes = run.program.boolean("parity.weighted");
  torch::manual_seed(5);
  torch::nn::Linear first(4, 4), second(4, 1);
  zr::Engine one(run.program, *first, "one"), two(run.program, *second, "two");
  const auto x = torch::ones({2, 4});
  while (!two.done()) {
    if (mistakes) {
      EXPECT_ANY_THROW(one.backward(second(first(x)).sum()));
    }
    two.backward(second(x * (two.micro_index() + 1)).square().sum());
    two.step();
  }
  const std::string hash = two.weights_hash();
  if (two.rank() == 0) std::cout << "hash " << hash << std::endl;
}

TEST_F(ProgramBackwardTest, TheBackwardOfAnotherEngineNeverCounts) {
  const std::string options = "strategy=zero1 train.steps=2 parity.weighted=";
  const Result plain = run(2, other_engine, options + "false"), mistaken = run(2, other_engine, options + "true");
  EXPECT_EQ(mistaken.code, 0) << mistaken.output;
  EXPECT_EQ(plain.output, mistaken.output);
  EXPECT_NE(plain.output.find("hash "), plain.output.npos);
}

// backward() through operators that used weights which the engine has replaced since.
void backward_after(Run& run, const std::function<void()>& change) {
  run.build();
  run.micro_step();
  const torch::Tensor old = run.model->loss(1, 0);
  change();
  run.engine->backward(old);
}

RANK_BODY(backward_after_step, Run) {
  backward_after(run, [&] { run.micro_step(); });
}
RANK_BODY(backward_after_set, Run) {
  backward_after(run, [&] {
    for (const zr::ParameterInfo& parameter : run.engine->parameters())
      run.engine->set(parameter.name, zr::TensorKind::value, run.engine->get(parameter.name) * 2);
  });
}
RANK_BODY(backward_after_load, Run) {
  backward_after(run, [&] {
    run.engine->save(run.program.text("job.runs") + "-saved");
    run.engine->load(run.program.text("job.runs") + "-saved");
  });
}
RANK_BODY(backward_after_swap, Run) {
  run.build();
  torch::Tensor old;
  {
    std::map<std::string, torch::Tensor> doubled;
    for (const zr::ParameterInfo& parameter : run.engine->parameters())
      doubled[parameter.name] = run.engine->get(parameter.name) * 2;
    const zr::Swap swap(*run.engine, doubled);
    old = run.model->loss(0, 0);
  }
  run.engine->backward(old);
}
// Nothing has changed the weights: the graph is as good as before.
RANK_BODY(backward_after_reads, Run) {
  backward_after(run, [&] {
    { const zr::Swap swap(*run.engine, std::map<std::string, torch::Tensor>()); }
    { const zr::Engine::Evaluation evaluation(*run.engine); }
    for (const zr::ParameterInfo& parameter : run.engine->parameters()) run.engine->get(parameter.name);
    run.engine->save(run.program.text("job.runs") + "-saved");
  });
  run.engine->step();
}

TEST_F(ProgramBackwardTest, AGraphFromBeforeNewWeightsIsAnError) {
  std::vector<std::pair<zr::test::RankBody, std::string>> cases{{backward_after_set, zr::test::kLayouts.back()},
                                                                {backward_after_load, zr::test::kLayouts.back()}};
  for (const std::string& layout : zr::test::kLayouts)
    cases.insert(cases.end(), {{backward_after_step, layout}, {backward_after_swap, layout}});
  for (const auto& [body, layout] : cases) {
    const Result ended = run(2, body, "train.steps=4 " + layout);
    EXPECT_EQ(ended.code, 1) << body.name() << " " << layout << ended.output;
    EXPECT_THAT(ended.output, testing::HasSubstr("has been modified by an inplace operation"));
    EXPECT_THAT(ended.output, testing::HasSubstr("or it is a parameter that engine.step(), set(), load() or zr::Swap "
                                                 "has changed since forward: call forward again"));
  }
  for (const std::string& layout : zr::test::kLayouts) {
    const Result done = run(2, backward_after_reads, "train.steps=4 " + layout);
    EXPECT_EQ(done.code, 0) << layout << done.output;
  }
}

}  // namespace
