// gradients.divisor: the sum of a step's gradients is divided by the micro-batches, or by the ranks.
#include "support/engine_test.hpp"
#include "support/layouts.hpp"

namespace {

using namespace engine_tests;

struct Trained {
  std::vector<double> losses, norms;
  std::vector<torch::Tensor> gradients;  // of one parameter, after each step
  std::string hash;
};

// Trains with SGD and two micro-batches per rank and step. `weight`: of each micro-batch, given to the engine, or
// else a factor of the loss.
Trained train(const Run& run, const std::vector<std::string>& keys, double weight = 1, bool given = true,
              bool edits = false) {
  std::vector<std::string> overrides(run.arguments.begin() + 1, run.arguments.end());
  for (const char* key :
       {"optimizer=sgd", "optimizer.sgd.momentum=0.5", "optimizer.sgd.nesterov=false", "optimizer.sgd.weight_decay=0.0",
        "train.gradient_clipping=0.0", "train.steps=3", "train.gradient_accumulation=2"})
    overrides.emplace_back(key);
  overrides.insert(overrides.end(), keys.begin(), keys.end());
  const zr::Program program(run.arguments[0], overrides,
                            {{"parity.model", "everything", "which model"},
                             {"parity.weighted", false, "unused here"},
                             {"parity.overflows", false, "unused here"}});
  const auto model = parity::make(program.text("parity.model"), 7);
  zr::Engine engine(program, *model);
  if (edits) engine.edit_gradients([](const std::string&, torch::Tensor gradient, int64_t) { gradient.clamp_(-1, 1); });
  Trained trained;
  const bool early = program.text("offload.optimizer") != "device";
  while (!engine.done()) {
    const auto loss = model->loss(engine.step_index(), engine.micro_index());
    engine.backward(given ? loss : loss * weight, given ? weight : 1);
    if (!engine.step()) continue;
    trained.losses.push_back(engine.last_loss());
    trained.norms.push_back(engine.last_grad_norm());
    if (early)
      EXPECT_THROW(engine.get("twice.weight", zr::TensorKind::gradient), zr::UserError) << "updates began in backward";
    else
      trained.gradients.push_back(engine.get("twice.weight", zr::TensorKind::gradient));
  }
  trained.hash = engine.weights_hash();
  return trained;
}

// The sum over two micro-steps is twice their mean, and so is everything that is made of it; exactly, as 2 and the
// learning rates are powers of two.
MULTIRANK_TEST(EngineTest, DividesGradientsByTheRanks, {1, 2},
               zr::test::combine({zr::test::kLayouts,
                                  {"gradients.reduce=each_micro_step", "gradients.reduce=last_micro_step"}})) {
  const Trained sum = train(run, {"gradients.divisor=ranks", "optimizer.lr=0.0625"});
  const Trained mean = train(run, {"optimizer.lr=0.125"});
  EXPECT_EQ(sum.hash, mean.hash);
  for (std::size_t step = 0; step < 3; ++step) {
    EXPECT_EQ(sum.losses[step], 2 * mean.losses[step]);
    EXPECT_EQ(sum.norms[step], 2 * mean.norms[step]);
    EXPECT_TRUE(same(sum.gradients[step], 2 * mean.gradients[step]));
  }
}

// Functions that edit gradients get averages of that divisor: large ones here, which a limit of 1 changes.
MULTIRANK_TEST(EngineTest, EditsGradientsDividedByTheRanks, {2}, {"strategy=zero1"}) {
  const Trained limited = train(run, {"gradients.divisor=ranks"}, 1000, true, true);
  EXPECT_EQ(limited.gradients[0].abs().max().item<float>(), 1);
  EXPECT_NE(limited.hash, train(run, {"gradients.divisor=ranks"}, 1000).hash);
}

MULTIRANK_TEST(EngineTest, DividesByTheRanksAndTheLossScale, {2}, {"strategy=zero1"}) {
  const std::string fp16 = "train.dtype=fp16", scale = "fp16.loss_scale=16.0";
  const Trained sum = train(run, {"gradients.divisor=ranks", fp16, scale, "optimizer.lr=0.0625"});
  const Trained mean = train(run, {fp16, scale, "optimizer.lr=0.125"});
  EXPECT_EQ(sum.hash, mean.hash);
  EXPECT_EQ(sum.norms[0], 2 * mean.norms[0]);
}

// Updates that begin during backward have the same divisor.
MULTIRANK_TEST(EngineTest, DividesGradientsByTheRanksInEarlyUpdates, {2}, {"strategy=zero2", "strategy=zero3"}) {
  const std::string early = "offload.optimizer=cpu";
  EXPECT_EQ(train(run, {"gradients.divisor=ranks", "optimizer.lr=0.0625", early, "train.nonfinite=stop"}).hash,
            train(run, {"optimizer.lr=0.125"}).hash);
}

// A weight is a factor of the loss: it does not change the divisor.
MULTIRANK_TEST(EngineTest, WeightsDoNotChangeADivisorOfRanks, {2}, {"strategy=zero1"}) {
  const std::string ranks = "gradients.divisor=ranks";
  const Trained given = train(run, {ranks}, 3, true), multiplied = train(run, {ranks}, 3, false);
  EXPECT_EQ(given.hash, multiplied.hash);
  EXPECT_EQ(given.norms, multiplied.norms);
  EXPECT_NE(given.hash, train(run, {ranks}).hash);
}

}  // namespace
