// Models that zr::deferred builds without memory.
#include "multirank/model/sharded_parameters.hpp"
#include "multirank/parity/models.hpp"

namespace {

using namespace sharded_tests;

// A deferred model, built without memory and trained, is bit-identical to one built normally.
RANK_BODY(builds_deferred, Run) {
  run.engine.reset();
  for (const std::string name : {"everything", "dropout", "recurrent", "tiny", "wide"}) {
    const auto plain = parity::make(name, 11);
    torch::manual_seed(12);  // the constructor seeds itself
    auto model = zr::deferred([&] { return parity::make(name, 11); });
    const auto plain_parameters = plain->named_parameters();
    zr::Engine engine(run.program, *model);
    for (const auto& item : plain_parameters)
      EXPECT_TRUE(torch::equal(engine.get(item.key()), item.value().detach()) ||
                  run.program.text("train.dtype") != "fp32")
          << name + ": " + item.key() + " is built the same";
    for (const auto& item : plain->named_buffers())
      EXPECT_TRUE(torch::equal(model->named_buffers()[item.key()].to(torch::kFloat), item.value().to(torch::kFloat)))
          << name + ": buffer " + item.key() + " is built the same";
    const std::string hash = engine.weights_hash();
    for (int i = 0; i < 2; ++i) {
      engine.backward(model->loss(engine.step_index(), engine.micro_index()));
      engine.step();
    }
    std::cout << name << " " << hash << " " << engine.weights_hash() << std::endl;
  }
}

RANK_BODY(builds_plainly, Run) {
  run.engine.reset();
  for (const std::string name : {"everything", "dropout", "recurrent", "tiny", "wide"}) {
    auto model = parity::make(name, 11);
    zr::Engine engine(run.program, *model);
    const std::string hash = engine.weights_hash();
    for (int i = 0; i < 2; ++i) {
      engine.backward(model->loss(engine.step_index(), engine.micro_index()));
      engine.step();
    }
    std::cout << name << " " << hash << " " << engine.weights_hash() << std::endl;
  }
}

// Initialisers that compute with more than one tensor, and write through views.
struct Initialised : torch::nn::Module {
  Initialised() {
    a = register_module("a", torch::nn::Linear(40, 60));
    b = register_module("b", torch::nn::Conv2d(torch::nn::Conv2dOptions(6, 6, 3)));
    torch::NoGradGuard no_grad;
    torch::nn::init::orthogonal_(a->weight);
    torch::nn::init::dirac_(b->weight);
    a->weight.mul_(0.5).add_(torch::randn({60, 40}), 0.1);
    a->bias.copy_(a->weight.select(1, 3));
    a->weight.t().select(0, 2).fill_(3);
    for (auto& p : b->parameters()) p.copy_(p.to(torch::kBFloat16));
    a->weight.mul_(a->weight.t().contiguous().flatten().view({60, 40}).reshape({2, 30, 40}).sum(0).mean());
    turned = register_buffer("turned", torch::arange(6).view({2, 3}).t().to(torch::kDouble).reshape({6}));
    table = register_buffer("table", torch::outer(torch::arange(5), torch::pow(2.0, torch::arange(4))).sin());
  }
  torch::nn::Linear a{nullptr};
  torch::nn::Conv2d b{nullptr};
  torch::Tensor table, turned;
};

RANK_BODY(builds_initialised, Run) {
  run.engine.reset();
  torch::manual_seed(3);
  const Initialised plain;
  torch::manual_seed(3);
  auto model = zr::deferred([] { return std::make_shared<Initialised>(); });
  zr::Engine engine(run.program, *model);
  for (const auto& item : plain.named_parameters())
    EXPECT_TRUE(torch::equal(engine.get(item.key()), item.value().detach())) << item.key() + " is initialised the same";
  EXPECT_TRUE(torch::equal(model->table, plain.table)) << "the table is computed the same";
  EXPECT_TRUE(torch::equal(model->turned, plain.turned)) << "the copy of another shape and dtype is computed the same";
}

TEST_F(ShardedParametersTest, DeferredModelIsBitIdenticalToAPlainOne) {
  for (const std::string strategy : {"zero0", "zero3"}) {
    EXPECT_EQ(run(builds_initialised, strategy).output, "");
    for (const std::string dtype : {"fp32", "bf16"}) {
      const Result plain = run(builds_plainly, strategy, "train.dtype=" + dtype),
                   deferred = run(builds_deferred, strategy, "train.dtype=" + dtype);
      EXPECT_EQ(plain.code, 0) << plain.output;
      EXPECT_EQ(deferred.code, 0) << deferred.output;
      EXPECT_EQ(said(deferred), said(plain)) << strategy << ", " << dtype;
    }
  }
}

RANK_BODY(uses_deferred, Run) {
  auto model = zr::deferred([] { return std::make_shared<Net>(); });
  model->loss(torch::randn({4, 48}));
}

RANK_BODY(builds_by_value, Run) {
  auto model = zr::deferred([] {
    auto net = std::make_shared<Net>();
    if (net->in->weight.sum().item<float>() > 0) net->in->reset_parameters();
    return net;
  });
}

TEST_F(ShardedParametersTest, DeferredModelReportsThatItHasNoValues) {
  rejects(
      uses_deferred,
      "this tensor was built by zr::deferred: it has values once the zr::Engine is made; read them with engine.get(), "
      "or build the model without zr::deferred");
  rejects(builds_by_value,
          "zr::deferred: aten::item needs values, which a deferred model has only after the engine is made; call it "
          "after that, or build the model without zr::deferred");
}

}  // namespace
