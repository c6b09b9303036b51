// What still works after a mistake of a program that uses zr::Engine, and what is no mistake.
#include "multirank/engine/user_errors.hpp"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

namespace {

using namespace user_errors_tests;
using testing::HasSubstr;

// Returns a copy of its input; its backward throws.
struct Throws : torch::autograd::Function<Throws> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("a bug in the backward of this function");
  }
};

// Mistakes during training that change nothing: the weights equal those of a run without them.
MULTIRANK_TEST(UserErrorsTest, MistakesBeforeGradientsAreReducedChangeNothing, {1, 2},
               zr::test::combine({kLayouts, {"train.gradient_accumulation=1", "train.gradient_accumulation=2"}})) {
  const auto mistakes = [&] {
    int thrown = 0;
    const auto fails = [&](const std::function<void()>& fn) {
      try {
        fn();
      } catch (const std::exception&) {
        ++thrown;
      }
    };
    const auto loss = run.loss();
    fails([&] { run.engine->backward(loss.detach()); });
    fails([&] { run.engine->backward(Throws::apply(loss)); });
    fails([&] { run.engine->backward(loss, std::numeric_limits<double>::quiet_NaN()); });
    fails([&] { run.engine->set("left.weight", zr::TensorKind::value, torch::zeros({2})); });
    fails([&] { run.engine->get("none"); });
    fails([&] {
      const zr::Engine::Evaluation evaluation(*run.engine);
      run.engine->backward(torch::zeros({}));
    });
    fails([&] { run.engine->backward(loss), run.engine->backward(loss); });  // the first call frees the graph
    EXPECT_EQ(thrown, 7) << "each mistake throws; thrown: " + std::to_string(thrown);
  };
  std::vector<std::string> hashes;
  for (const bool errs : {false, true}) {
    run.net = std::make_shared<Net>();
    run.make_engine();
    while (run.engine->step_index() < 3) {
      for (int micro = 0; micro < run.engine->accumulation(); ++micro) {
        if (errs && micro == 0) {
          mistakes();
          ++micro;  // the last mistake contains one correct backward()
        }
        if (micro < run.engine->accumulation()) run.backward();
      }
      run.engine->step();
    }
    hashes.push_back(run.engine->weights_hash());
  }
  EXPECT_EQ(hashes[0], hashes[1]) << "mistakes change no weight";
}

// In every step, the last micro-batch of the last rank has no data, so its loss is NaN.
RANK_BODY(empty_micro_batch, Run) {
  const int64_t micros = int64_t{run.engine->accumulation()} * run.engine->world();
  const bool leaves_out = micros == 3;  // the reference run, which does not have that micro-batch
  while (run.engine->step_index() < 3) {
    do {
      const bool empty = !leaves_out && run.engine->micro_index() == 3;
      // Every rank runs one forward pass, because operators on sharded parameters are collective.
      const auto nothing = torch::empty({0, 6}, run.net->left->weight.options());
      const auto loss = empty ? run.net->forward(nothing).to(torch::kFloat).mean() : run.loss();
      EXPECT_EQ(empty, loss.isnan().item<bool>()) << "the mean of no elements is NaN";
      run.engine->backward(loss, empty ? 0 : 1);
    } while (!run.engine->step());
    EXPECT_TRUE(std::isfinite(run.engine->last_loss())) << "the loss of the step is finite";
  }
  const std::string hash = run.engine->weights_hash();
  if (run.first()) std::cout << run.engine->last_loss() << " " << hash << std::endl;
}

RANK_BODY(nothing_weighs, Run) {
  const std::string before = run.engine->weights_hash();
  try {
    do run.engine->backward(run.loss(), 0);
    while (!run.engine->step());
  } catch (const std::exception& error) {
    if (run.first()) std::cout << error.what() << std::endl;
  }
  EXPECT_TRUE(run.engine->weights_hash() == before && run.engine->step_index() == 0) << "no step was completed";
  run.step();
  EXPECT_EQ(run.engine->step_index(), 1) << "training continues";
}

TEST_F(UserErrorsTest, MicroBatchOfWeightZeroHasNoEffect) {
  const std::string reference = passes(1, empty_micro_batch, "strategy=zero0 train.gradient_accumulation=3");
  const auto expect_same = [&](int ranks, const std::string& how) {
    const std::string all = how + " train.gradient_accumulation=" + std::to_string(4 / ranks);
    EXPECT_EQ(passes(ranks, empty_micro_batch, all), reference) << ranks << " ranks, " << all;
  };
  for (const auto& strategy : kLayouts) {
    for (const int ranks : {1, 2, 4}) expect_same(ranks, strategy);
    expect_same(4, strategy + " gradients.reduce=last_micro_step");
  }
  for (const int ranks : {1, 2}) {
    const std::string text = passes(ranks, nothing_weighs, "strategy=zero1");
    EXPECT_THAT(text, HasSubstr("for step 1 add up to 0 over all ranks and micro-batches"));
  }
}

// After the evaluation, the random state is that of the loaded checkpoint, as without an evaluation.
MULTIRANK_TEST(UserErrorsTest, LoadInsideEvaluationRestoresTheRandomState, {1, 2}, {"strategy=zero1"}) {
  run.step();
  const std::string folder = run.engine->save(run.program.text("job.runs") + "/saved");
  run.step();
  {
    const zr::Engine::Evaluation outer(*run.engine);
    const zr::Engine::Evaluation inner(*run.engine);
    run.engine->load(folder);
    torch::rand({3});
  }
  const auto inside = torch::rand({5});
  run.engine->load(folder);
  EXPECT_TRUE(torch::equal(torch::rand({5}), inside)) << "the random state is that of the checkpoint";
}

MULTIRANK_TEST(UserErrorsTest, ScopesOutliveTheirEngine, {2}, kLayouts) {
  run.step();
  {
    const auto scope = zr::gather(run.net->left->weight);
    const zr::Engine::Evaluation evaluation(*run.engine);
    run.engine.reset();
  }
  run.net = std::make_shared<Net>();
  run.make_engine();
  run.step();
}

MULTIRANK_TEST(UserErrorsTest, AcceptsInputsCastToTheEngineDtype, {1},
               {"train.dtype=fp32", "train.dtype=bf16", "train.dtype=fp16"}) {
  const auto x = torch::randn({4, 6}, torch::kDouble).to(run.engine->dtype());
  run.engine->backward(run.net->forward(x).to(torch::kFloat).mean());
  run.engine->step();
}

}  // namespace
