// Models that zr::deferred builds without memory.
#include <ATen/CPUGeneratorImpl.h>

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

// Constructors that change shapes and storages in place, draw from generators and write through pointers.
struct Unusual : torch::nn::Module {
  Unusual() {
    const torch::NoGradGuard no_grad;
    auto scaled = torch::randn({20, 20});
    scaled.mul_(torch::arange(20));
    scaled.t_();
    register_parameter("turned", scaled.contiguous());
    wide = register_parameter("wide", torch::empty({4, 9}));
    torch::nn::init::orthogonal_(wide);
    register_parameter("listed", torch::tensor(std::vector<float>{1, 2.5, -3}));
    torch::Tensor by_pointer = torch::empty({3});
    auto values = by_pointer.accessor<float, 1>();
    for (int64_t i = 0; i < 3; ++i) values[i] = static_cast<float>(2 * i + 2);
    register_parameter("by_pointer", by_pointer * 2);
    register_parameter("read_again", torch::full({2}, values[1]));  // nothing has changed it
    torch::manual_seed(8);
    register_parameter("seeded", torch::randn({30}));
    torch::manual_seed(8);
    register_parameter("seeded_again", torch::randn({30}) * 2);
    auto own = at::make_generator<at::CPUGeneratorImpl>(3);
    register_parameter("by_generator", torch::empty({5, 7}).normal_(0, 1, own));
    drawn = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())->random();
    const auto flat = torch::randn({24});
    register_parameter("first_part", flat.slice(0, 0, 12).view({3, 4}));
    register_parameter("second_part", flat.slice(0, 12, 24));
    register_parameter("double", torch::rand({6}, torch::kDouble));
    register_parameter("frozen_columns", torch::rand({3, 5}).t(), false);
    std::vector<float> memory{4, 5, 6};
    register_parameter("copied", torch::from_blob(memory.data(), {3}).clone());
    auto replaced = register_parameter("replaced", torch::zeros({3}));
    replaced.set_data(torch::rand({8}));
    replaced.mul_(3);
    register_buffer("of_parameter", wide.sum(0));
    plain = torch::rand({5});
    torch::rand({40});
  }
  torch::Tensor wide, plain;  // plain: not registered
  uint64_t drawn = 0;
};

RANK_BODY(builds_unusual, Run) {
  run.engine.reset();
  const auto next = [] { return torch::rand({3}); };
  torch::manual_seed(3);
  const Unusual ordinary;
  const torch::Tensor after = next();
  torch::manual_seed(3);
  auto model = zr::deferred([] { return std::make_shared<Unusual>(); });
  EXPECT_TRUE(torch::equal(next(), after)) << "random numbers continue as after an ordinary construction";
  zr::Engine engine(run.program, *model);
  EXPECT_EQ(model->drawn, ordinary.drawn);
  for (const auto& item : ordinary.named_parameters())
    EXPECT_TRUE(torch::equal(engine.get(item.key()), item.value().detach().to(torch::kFloat)))
        << item.key() << " is built the same";
  EXPECT_TRUE(torch::equal(model->named_buffers()["of_parameter"], ordinary.named_buffers()["of_parameter"]));
  EXPECT_TRUE(torch::equal(model->plain, ordinary.plain)) << "also on rank " << engine.rank();
}

// Two models of one call, and a call within another one.
RANK_BODY(builds_two, Run) {
  run.engine.reset();
  const auto build = [] { return std::make_pair(std::make_shared<Net>(), std::make_shared<Net>()); };
  torch::manual_seed(3);
  const auto ordinary = build();
  torch::manual_seed(3);
  const auto deferred = zr::deferred([&] { return zr::deferred(build); });
  zr::Engine first(run.program, *deferred.first);
  zr::Engine second(run.program, *deferred.second, "second");
  for (const auto& item : ordinary.first->named_parameters())
    EXPECT_TRUE(torch::equal(first.get(item.key()), item.value().detach())) << item.key();
  for (const auto& item : ordinary.second->named_parameters())
    EXPECT_TRUE(torch::equal(second.get(item.key()), item.value().detach())) << "second " << item.key();
}

TEST_F(ShardedParametersTest, DeferredConstructorMayDoWhatAnOrdinaryOneDoes) {
  for (const std::string strategy : {"zero0", "zero3"}) {
    for (const auto* body : {&builds_unusual, &builds_two}) {
      const Result result = run(*body, strategy);
      EXPECT_EQ(result.code, 0) << strategy << "\n" << result.output;
    }
  }
}

TEST_F(ShardedParametersTest, DeferredModelIsBitIdenticalToAPlainOne) {
  for (const std::string strategy : {"zero0", "zero3"}) {
    EXPECT_EQ(run(builds_initialised, strategy).output, "");
    for (const std::string dtype : {"fp32", "bf16"}) {
      const Result plain = run(builds_plainly, strategy, "'train.cast_buffers=[\"*\"]' train.dtype=" + dtype),
                   deferred = run(builds_deferred, strategy, "'train.cast_buffers=[\"*\"]' train.dtype=" + dtype);
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

// A constructor called by another one needs a value through an operator of several.
RANK_BODY(builds_by_comparison, Run) {
  struct Inner : torch::nn::Module {
    Inner() { EXPECT_FALSE(torch::allclose(register_parameter("w", torch::randn({4})), torch::zeros({4}))); }
  };
  struct Outer : torch::nn::Module {
    Outer() { register_module("inner", std::make_shared<Inner>()); }
  };
  zr::deferred([] { return std::make_shared<Outer>(); });
}

// An operator that fails when it runs.
RANK_BODY(builds_with_failure, Run) {
  run.engine.reset();
  auto model = zr::deferred([] {
    torch::nn::Linear line(4, 4);
    const torch::NoGradGuard no_grad;
    line->weight.index_put_({torch::tensor({9})}, torch::ones({4}));
    return line;
  });
  zr::Engine engine(run.program, *model);
}

RANK_BODY(builds_with_late_pointer, Run) {
  run.engine.reset();
  auto model = zr::deferred([] {
    torch::nn::Linear line(4, 4);
    torch::Tensor table = torch::empty({4});
    float* values = table.data_ptr<float>();
    table.zero_();
    values[0] = 1;
    line->register_buffer("table", table);
    return line;
  });
  zr::Engine engine(run.program, *model);
}

// Reads that an ordinary constructor may make, and that would have other values here.
RANK_BODY(builds_with_late_read, Run) {
  run.engine.reset();
  auto model = zr::deferred([] {
    torch::nn::Linear line(4, 4);
    torch::Tensor table = torch::empty({4});
    auto values = table.accessor<float, 1>();
    table.view({2, 2}).fill_(3);
    line->register_buffer("table", torch::full({3}, values[0]));
    return line;
  });
  zr::Engine engine(run.program, *model);
}
RANK_BODY(reads_too_much_memory, Run) {
  zr::deferred([] { return torch::tensor(std::vector<float>(300000, 1)); });
}
RANK_BODY(reads_zeros, Run) {
  zr::deferred([] {
    torch::Tensor zeros = torch::zeros({2, 3});
    return zeros.accessor<float, 2>()[0][0];
  });
}
RANK_BODY(makes_sparse, Run) {
  zr::deferred([] { return torch::ones({2, 3}).to_sparse(); });
}

RANK_BODY(writes_outside, Run) {
  torch::Tensor outside = torch::zeros({4});
  zr::deferred([&] { outside.copy_(torch::rand({4})); });
}

const char* const kLatePointer =
    "zr::deferred: a tensor of the constructor was written through a pointer (data_ptr(), accessor()) after an "
    "operator had used it, or read through one after an operator had changed it, which the deferred model cannot "
    "repeat; use the pointer before that operator, use operators such as fill_(), copy_() and select() instead, or "
    "build the model without zr::deferred";

TEST_F(ShardedParametersTest, DeferredModelReportsThatItHasNoValues) {
  rejects(builds_by_comparison,
          "zr::deferred: aten::allclose needs values, which a deferred model has only after the engine is made; call "
          "it after that, or build the model without zr::deferred");
  rejects(builds_with_failure,
          "zr::deferred: aten::index_put_ failed when the engine constructed parameter 'weight': index 9 is out of "
          "bounds for dimension 0 with size 4");
  rejects(builds_with_late_pointer, kLatePointer);
  rejects(builds_with_late_read, kLatePointer);
  rejects(reads_too_much_memory,
          "this tensor [300000] of aten::empty was built by zr::deferred: it has values once the zr::Engine is made; "
          "read them with engine.get(), or build the model without zr::deferred; through pointers (data_ptr(), "
          "accessor(), torch::tensor()), a constructor can write 1 MiB of a tensor and 16 MiB in all: for more, "
          "copy_() a tensor of torch::from_blob()");
  rejects(reads_zeros,
          "this tensor [2, 3] of aten::zeros was built by zr::deferred: it has values once the zr::Engine is made; "
          "read them with engine.get(), or build the model without zr::deferred; through pointers (data_ptr(), "
          "accessor()), a constructor can use only tensors of torch::empty(), before their first operator");
  rejects(makes_sparse,
          "zr::deferred: aten::_to_sparse makes a tensor of layout Sparse, which a deferred model cannot have; call it "
          "after the engine is made, or build the model without zr::deferred");
  rejects(writes_outside,
          "zr::deferred: aten::copy_ writes a deferred tensor, which has no values yet, into an ordinary tensor; build "
          "both within zr::deferred, or build the model without it");
  rejects(uses_deferred,
          "was built by zr::deferred: it has values once the zr::Engine is made; read them with engine.get(), "
          "or build the model without zr::deferred");
  rejects(builds_by_value,
          "zr::deferred: aten::item needs values, which a deferred model has only after the engine is made; call it "
          "after that, or build the model without zr::deferred");
}

}  // namespace
