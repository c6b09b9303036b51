// engine.release() gives the model its full weights. The cases "release" of user_errors.txt run bodies of this file.
#include <gmock/gmock.h>

#include "multirank/engine/user_errors.hpp"

namespace {

using namespace user_errors_tests;
namespace fs = std::filesystem;

RANK_BODY(releases, Run) {
  for (int i = 0; i < 3; ++i) run.step();
  const auto before = run.net->named_parameters();
  std::map<std::string, torch::Tensor> values;
  for (const auto& item : before) values[item.key()] = run.engine->get(item.key());
  double inside = 0;
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    inside = run.net->loss(7, 0).item<double>();
  }
  const auto dtype = run.engine->dtype();
  const bool master = run.program.text("job.name") == "master";
  const int rank = run.engine->rank();
  master ? run.engine->release(torch::kFloat) : run.engine->release();
  for (const auto& item : run.net->named_parameters()) {
    const auto& parameter = item.value();
    EXPECT_EQ(parameter.scalar_type(), (master ? torch::kFloat : dtype)) << item.key() + " has the dtype";
    EXPECT_TRUE(torch::equal(parameter.detach(), values[item.key()].to(parameter.scalar_type())))
        << item.key() + " has the values";
    EXPECT_TRUE(!parameter.grad().defined() && parameter.requires_grad() && parameter.is_leaf())
        << item.key() + " is plain";
    EXPECT_NE(parameter.data_ptr(), nullptr) << item.key() + " has memory";
    EXPECT_TRUE(before[item.key()].is_same(parameter)) << item.key() + " is the same tensor";
  }
  if (rank == 0) {  // on one rank only: after release() nothing is collective
    const double outside = run.net->loss(7, 0).item<double>();
    EXPECT_TRUE(master ? std::abs(outside - inside) < 0.02 : outside == inside)
        << "the loss equals that of the evaluation";
    run.net->loss(8, 0).backward();
    EXPECT_TRUE(run.net->left->weight.grad().defined()) << "plain autograd works";
    run.net->zero_grad();
    const torch::NoGradGuard no_grad;
    run.net->left->weight.add_(1).sub_(1);
  }
  // Another engine continues the training.
  run.net->zero_grad();
  for (const auto& item : run.net->named_parameters()) {
    const torch::NoGradGuard no_grad;
    item.value().copy_(values[item.key()]);
  }
  run.make_engine();
  for (int i = 0; i < 2; ++i) run.step();
  const std::string hash = run.engine->weights_hash();
  if (rank == 0) std::cout << inside << " " << hash << std::endl;
}

// Plain gradient descent over two phases of training is bit-identical without and with engines.
RANK_BODY(follows_torch, Run) {
  const auto twin = std::make_shared<Net>();
  for (int phase = 0; phase < 2; ++phase) {
    const auto rate = static_cast<float>(run.program.number("optimizer.lr"));
    for (int64_t step = 0; step < 3; ++step) {
      twin->zero_grad();
      twin->loss(step, 0).backward();
      const torch::NoGradGuard no_grad;
      for (auto& parameter : twin->parameters()) parameter.sub_(parameter.grad() * rate);
      const torch::AutoGradMode grad(true);
      run.step();
    }
    for (const auto& item : twin->named_parameters())
      EXPECT_TRUE(torch::equal(run.engine->get(item.key()), item.value()))
          << item.key() + " is bit-identical to libtorch";
    run.engine->release();
    EXPECT_TRUE(torch::equal(run.net->loss(5, 0), twin->loss(5, 0)))
        << "the loss of the released model is bit-identical too";
    run.make_engine();
  }
}

TEST_F(UserErrorsTest, ReleaseReturnsFullWeights) {
  const std::string descent =
      "train.gradient_accumulation=1 optimizer=sgd optimizer.sgd.momentum=0.0 optimizer.sgd.nesterov=false "
      "optimizer.sgd.weight_decay=0.0 ";
  const std::string reference = passes(1, follows_torch, descent + "strategy=zero0");
  EXPECT_EQ(reference, "");
  for (const auto& strategy : kLayouts) passes(1, follows_torch, descent + strategy);
  for (const std::string dtype : {"fp32", "bf16"})
    for (const std::string name : {"own", "master"}) {
      const std::string how = " train.dtype=" + dtype + " job.name=" + name,
                        expected = passes(2, releases, "strategy=zero0" + how);
      for (const auto& strategy : kLayouts) EXPECT_EQ(passes(2, releases, strategy + how), expected) << strategy << how;
      const std::string tier = " offload.optimizer=cpu offload.gradients=cpu";
      EXPECT_EQ(passes(2, releases, "strategy=zero2" + tier + how), expected) << "zero2 with tiers" << how;
      EXPECT_EQ(passes(2, releases, kGathersEachUse + tier + " offload.parameters=cpu" + how), expected)
          << "zero3 with tiers" << how;
    }
}

TEST_F(UserErrorsTest, SLOW_ReleaseReturnsFullWeightsFromTiersAndDuringAnAsynchronousSave) {
  fs::create_directory(folder_ / "swap");
  const std::string disk = " offload.nvme.path=" + (folder_ / "swap").string() +
                           " offload.nvme.block_bytes=4KiB offload.nvme.depth=1 offload.optimizer=nvme ",
                    activations = " offload.activations=nvme offload.activation_bytes=1B ",
                    async = " checkpoint.async=true checkpoint.every=1 train.steps=9 checkpoint.dir=";
  int saved = 0;
  const std::string half = "train.dtype=fp16 fp16.initial_scale_power=12 ";
  for (const std::string dtype : {"train.dtype=fp32 ", "train.dtype=bf16 ", half.c_str()})
    for (const std::string name : {"own", "master"}) {
      const std::string how = dtype + "job.name=" + name + " ", expected = passes(2, releases, how + "strategy=zero0");
      if (dtype == half) {  // the previous test covers the other dtypes
        EXPECT_EQ(passes(2, releases, how + kGathersEachUse), expected) << how;
        EXPECT_EQ(passes(2, releases, how + "strategy=zero1 offload.optimizer=cpu"), expected) << how;
      }
      EXPECT_EQ(passes(2, releases, how + "strategy=zero2 offload.gradients=nvme" + disk + activations), expected)
          << how;
      const std::string folder = (folder_ / ("async" + std::to_string(++saved))).string();
      EXPECT_EQ(passes(2, releases, how + kGathersEachUse + " offload.parameters=nvme" + disk + async + folder),
                expected)
          << how;
    }
  EXPECT_EQ(passes(1, releases, half + "strategy=zero3 job.name=own" + disk + activations),
            passes(1, releases, half + "strategy=zero0 job.name=own"));
  EXPECT_TRUE(fs::is_empty(folder_ / "swap")) << "an engine left files in the folder of its tier";
}

RANK_BODY(released_engine, Run) {
  run.step();
  const auto view = run.net->left->weight.t();
  zr::Engine& engine = *run.engine;
  const auto loss = run.loss();
  engine.release();
  says("backward", [&] { engine.backward(loss); });
  says("step", [&] { engine.step(); });
  says("get", [&] { engine.get("left.weight"); });
  says("set", [&] { engine.set("left.weight", zr::TensorKind::value, torch::zeros({7, 6})); });
  says("save", [&] { engine.save("x"); });
  says("load", [&] { engine.load("x"); });
  says("mean", [&] { engine.mean(1); });
  says("weights_hash", [&] { engine.weights_hash(); });
  says("finish", [&] { engine.finish(); });
  says("validation", [&] { engine.validation(1); });
  says("add_tokens", [&] { engine.add_tokens(1); });
  says("done", [&] { engine.done(); });
  says("rank", [&] { engine.rank(); });
  says("dtype", [&] { engine.dtype(); });
  says("validation_due", [&] { engine.validation_due(); });
  says("release", [&] { engine.release(); });
  says("Evaluation", [&] { const zr::Engine::Evaluation evaluation(engine); });
  const auto scope = zr::gather(run.net->left->weight);
}

RANK_BODY(release_misuse, Run) {
  says("type", [&] { run.engine->release(torch::kDouble); });
  run.backward();
  says("within a step", [&] { run.engine->release(); });
  run.engine->step();
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    says("within an evaluation", [&] { run.engine->release(); });
  }
  says("second engine", [&] { const zr::Engine second(run.program, *run.net); });
  run.step();
  run.engine->release();
}

RANK_BODY(destroys, Run) {
  run.step();
  run.engine.reset();
  says("use", [&] { std::cout << run.net->left->weight.sum().item<float>(); });
  says("engine", [&] { run.make_engine(); });
}

}  // namespace
