// Blocks of zr::checkpoint have the values and gradients of the same blocks without it, or backward says why not.
#include "zr/recompute.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <thread>

#include "support/said_by.hpp"

namespace zr::host {
namespace {

using test::said_by;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Block = std::function<Tensor(const Tensor&)>;
/// Runs a block, in zr::checkpoint or not.
using Around = std::function<Tensor(const Block& block, const Tensor& x)>;

Tensor directly(const Block& block, const Tensor& x) { return block(x); }
Tensor in_checkpoint(const Block& block, const Tensor& x) { return checkpoint(block, x); }

Tensor input(double scale = 1) {
  return torch::arange(12, torch::kFloat).view({3, 4}).sin_().mul_(scale).requires_grad_();
}

bool same(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() || (a.dtype() == b.dtype() && at::equal(a, b));
}

// Expects the same tensors from a program with blocks as they are and with blocks in zr::checkpoint.
void expect_same(const std::function<Tensors(const Around&)>& program) {
  torch::manual_seed(5);
  const Tensors plain = program(directly);
  torch::manual_seed(5);
  const Tensors again = program(in_checkpoint);
  ASSERT_EQ(plain.size(), again.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(same(plain[i], again[i])) << i << "\n" << again[i];
}

// Autocast of the CPU in bf16, as a scope of a program: it clears its cache at the end of the outermost one.
struct Autocast {
  explicit Autocast(bool clears = true) : before(at::autocast::is_autocast_enabled(at::kCPU)), clears(clears) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0 && clears) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before);
  }
  bool before, clears;
};

class RecomputeTest : public ::testing::Test {
 protected:
  ~RecomputeTest() override { at::autocast::clear_cache(); }
};

TEST_F(RecomputeTest, ForwardAfterBackwardUnderAutocastUsesNewWeights) {
  expect_same([](const Around& around) {
    const Tensor w = torch::ones({4, 4}).requires_grad_();
    Tensors results;
    for (const double weight : {1, -1, 2}) {
      {
        const torch::NoGradGuard no_grad;
        w.fill_(weight);
      }
      Tensor y;
      {
        const Autocast autocast;
        y = around([w](const Tensor& x) { return torch::linear(x, w).tanh(); }, torch::ones({1, 4}).requires_grad_());
      }
      y.sum().backward();
      results.insert(results.end(), {y, w.grad().clone()});
    }
    return results;
  });
}

TEST_F(RecomputeTest, BackwardInsideAnAutocastRegionKeepsItsCasts) {
  expect_same([](const Around& around) {
    const Tensor w = (torch::eye(4) / 3).requires_grad_(), x = input();
    const Autocast autocast;
    const Tensor first = torch::linear(x, w);  // fills the cache
    const auto twice = [w](const Tensor& z) { return torch::linear(torch::linear(z, w).tanh(), w); };
    around(twice, first).sum().backward({}, true);
    const Tensor second = torch::linear(x, w) + around(twice, x);
    second.sum().backward();
    return Tensors{first, second, w.grad(), x.grad()};
  });
}

TEST_F(RecomputeTest, AutocastRegionInsideABlockLeavesNoCasts) {
  expect_same([](const Around& around) {
    const Tensor w = torch::ones({4, 4}).requires_grad_(), x = input();
    Tensors results;
    for (int step = 0; step < 2; ++step) {
      Tensor y;
      {
        const Autocast outer;
        y = around(
            [w](const Tensor& z) {
              const Autocast inner;
              at::autocast::set_autocast_cache_enabled(true);
              return torch::linear(z, w).tanh();
            },
            x);
      }
      y.sum().backward();
      const torch::NoGradGuard no_grad;
      w.neg_();
      results.insert(results.end(), {y, w.grad().clone()});
    }
    return results;
  });
}

TEST_F(RecomputeTest, ReportsAnOutdatedCastOfAutocast) {
  const Tensor w = torch::ones({2, 4}).requires_grad_(), x = input();
  const Autocast autocast;
  torch::linear(x, w);
  {
    const torch::NoGradGuard no_grad;
    w.neg_();
  }
  const Tensor y = checkpoint([w](const Tensor& z) { return torch::linear(z, w).tanh(); }, x);
  EXPECT_EQ(
      said_by([&] { y.sum().backward(); }),
      "the block of zr::checkpoint used a parameter [2, 4] under autocast, whose cache holds a cast of its earlier "
      "values, so the block cannot be recomputed; call at::autocast::clear_cache() after each change of the "
      "parameter");
}

TEST_F(RecomputeTest, UsesTheModesOfForward) {
  expect_same([](const Around& around) {
    const Tensor x = input();
    c10::set_default_dtype(caffe2::TypeMeta::fromScalarType(at::kDouble));
    const Tensor y = around(
        [](const Tensor& z) {
          const Tensor scale = torch::full({4}, 3.0).tanh();  // of the default dtype
          Tensor constant;
          {
            const torch::NoGradGuard no_grad;
            constant = z.exp();
          }
          return (z * scale * constant).cos();
        },
        x);
    c10::set_default_dtype(caffe2::TypeMeta::fromScalarType(at::kFloat));
    const Tensor loss = y.sum();
    const torch::NoGradGuard no_grad;
    loss.backward();
    return Tensors{y, x.grad()};
  });
}

TEST_F(RecomputeTest, RejectsASavedTensorThatWasChangedAsLibtorchDoes) {
  const Tensor w = torch::eye(4).requires_grad_(), x = input();
  const auto block = [w](const Tensor& z) {
    Tensor y = torch::sigmoid(z.mm(w));
    y.mul_(2);
    return y;
  };
  EXPECT_THROW(block(x).sum().backward(), c10::Error);
  EXPECT_EQ(said_by([&] { checkpoint(block, x).sum().backward(); }),
            "backward needs a tensor [3, 4] that was changed in place after forward had saved it; change a copy");
  const Tensor y = checkpoint([w](const Tensor& z) { return torch::sigmoid(z.mm(w)); }, x);
  const Tensor loss = y.sum();
  y.mul_(2);  // after the block
  EXPECT_EQ(said_by([&] { loss.backward(); }),
            "backward needs a tensor [3, 4] that was changed in place after forward had saved it; change a copy");
}

TEST_F(RecomputeTest, ReportsParametersAndCapturedTensorsThatChangedAfterForward) {
  const Tensor w = torch::eye(4).requires_grad_(), bias = torch::zeros({4}).requires_grad_();
  const Tensor captured = torch::ones({3, 4}), x = input();
  const auto loss = [&] {
    return checkpoint([=](const Tensor& z) { return (torch::addmm(bias, z, w) + captured).tanh(); }, x).sum();
  };
  const auto after = [&](const Tensor& changed) {
    const Tensor value = loss();
    {
      const torch::NoGradGuard no_grad;
      changed.add_(1);
    }
    return said_by([&] { value.backward(); });
  };
  const std::string remedy =
      " that was changed in place after the block had run, so the block cannot be recomputed; change it after "
      "backward, "
      "or change a copy";
  EXPECT_EQ(after(bias), "the block of zr::checkpoint uses a parameter [4]" + remedy);
  EXPECT_EQ(after(captured), "the block of zr::checkpoint uses a tensor [3, 4]" + remedy);
  EXPECT_EQ(after(captured.view({12})), "the block of zr::checkpoint uses a tensor [3, 4]" + remedy);
  EXPECT_EQ(after(x),
            "an input of zr::checkpoint was changed in place after the block had run, so the block cannot be "
            "recomputed; change a copy of the input");
  loss().backward();
  const Tensor value = checkpoint([w](const Tensor& z) { return z.mm(w); }, x).sum();
  {
    const torch::NoGradGuard no_grad;
    w.add_(1);
  }
  EXPECT_EQ(said_by([&] { value.backward(); }),
            "backward needs a parameter [4, 4] that was changed in place after forward had saved it; change it after "
            "backward");
}

TEST_F(RecomputeTest, BlockInABlockTakesTheOuterBlocksInput) {
  expect_same([](const Around& around) {
    const Tensor w = torch::eye(4).requires_grad_(), leaf = input();
    const Tensor x = leaf * 1.5;
    const Block inner = [w](const Tensor& z) { return z.mm(w).tanh(); };
    const Tensor y =
        around([=](const Tensor& z) { return around(inner, z) * around(inner, z.t().contiguous().t()); }, x);
    const Tensor same_input = around([=](const Tensor& z) { return around(inner, z); }, leaf);
    const Tensor itself = around([](const Tensor& z) { return z; }, x);
    (y + same_input + itself).sum().backward();
    return Tensors{y, same_input, w.grad(), leaf.grad()};
  });
}

TEST_F(RecomputeTest, TensorsInTuplesAndContainersAreInputs) {
  const auto run = [](bool checkpointed) {
    const Tensor x = input(), w = torch::eye(4).requires_grad_();
    const auto block = [](const Tensors& list, const Tensor& z, const Tensor& indices, const Tensor& none) {
      EXPECT_FALSE(none.defined());
      return std::make_tuple(list[0].mm(list[1]).tanh(), z.index_select(1, indices).exp());
    };
    const Tensors list{x * 2, w};
    const Tensor indices = torch::tensor({3, 0});
    const auto [a, b] =
        checkpointed ? checkpoint(block, list, x * 3, indices, Tensor()) : block(list, x * 3, indices, {});
    (a.sum() + b.sum()).backward();
    return Tensors{a, b, x.grad(), w.grad()};
  };
  const Tensors plain = run(false), again = run(true);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(same(plain[i], again[i])) << i;
}

TEST_F(RecomputeTest, BackwardTwiceAndDoubleBackward) {
  expect_same([](const Around& around) {
    const Tensor x = input(), w = torch::eye(4).requires_grad_();
    const Block block = [w](const Tensor& z) { return torch::dropout(z.mm(w).tanh(), 0.4, true).exp(); };
    const Tensor y = around(block, x * 2).sum();
    y.backward({}, true);
    y.backward();
    const Tensor gradient = torch::autograd::grad({around(block, x * 2).sum()}, {x}, {}, true, true)[0];
    gradient.pow(2).sum().backward();
    return Tensors{x.grad(), w.grad(), gradient};
  });
}

TEST_F(RecomputeTest, HooksOfABlockRunOnce) {
  for (const Around& around : {Around(directly), Around(in_checkpoint)}) {
    const Tensor w = torch::eye(4).requires_grad_(), x = input();
    int parameter = 0, inside = 0, leaf = 0;
    const Tensor y = around(
        [&, w](const Tensor& z) {
          w.register_hook([&](Tensor) { ++parameter; });
          z.register_hook([&](Tensor) { ++leaf; });
          const Tensor h = z.mm(w);
          h.register_hook([&](Tensor gradient) {
            ++inside;
            return gradient * 2;
          });
          return h.tanh();
        },
        x);
    y.sum().backward();
    EXPECT_EQ(inside, 1);
    EXPECT_EQ(leaf, 1);
    EXPECT_EQ(parameter, 1);
    (x.mm(w)).sum().backward();
    EXPECT_EQ(parameter, 2);
  }
}

TEST_F(RecomputeTest, BuffersChangeOnce) {
  expect_same([](const Around& around) {
    torch::nn::BatchNorm1d norm(4);
    const Tensor average = torch::zeros({4}), x = input();
    Tensors results;
    for (int step = 0; step < 2; ++step) {
      const Block block = [norm, average](const Tensor& z) mutable {
        {
          const torch::NoGradGuard no_grad;
          average.view({2, 2}).mul_(0.5);
          average.add_(z.detach().mean(0));
        }
        return norm->forward(z * average).tanh();
      };
      const Tensor y = around([=](const Tensor& z) { return around(block, z * 2); }, x * 1.5);
      y.sum().backward();
      results.insert(results.end(), {y, average.clone(), norm->running_mean.clone(), norm->running_var.clone(),
                                     norm->num_batches_tracked.clone()});
    }
    results.insert(results.end(), {x.grad(), norm->weight.grad()});
    return results;
  });
}

TEST_F(RecomputeTest, ReportsABlockThatChangesItsInputsOrTensorsWithGradients) {
  const Tensor leaf = input(), w = torch::eye(4).requires_grad_();
  const Tensor z = checkpoint([](Tensor t) { return t.mul_(2).tanh(); }, leaf * 2);
  EXPECT_EQ(said_by([&] { z.sum().backward(); }),
            "the block of zr::checkpoint changes a tensor [3, 4] in place, which is one of its inputs, so it cannot be "
            "recomputed; change a copy");
  const Tensor v = checkpoint(
      [w](const Tensor& t) {
        {
          const torch::NoGradGuard no_grad;
          w.mul_(0.5);
        }
        return t.mm(w).tanh();
      },
      leaf);
  EXPECT_EQ(said_by([&] { v.sum().backward(); }),
            "the block of zr::checkpoint changes a parameter [4, 4] in place, which is not its own and requires "
            "gradients, so it cannot be recomputed; change it outside the block");
}

TEST_F(RecomputeTest, RepeatsDrawsFromAGeneratorOfTheProgram) {
  expect_same([](const Around& around) {
    const Tensor x = input();
    const at::Generator own = at::make_generator<at::CPUGeneratorImpl>(3);
    const Block block = [own](const Tensor& z) {
      const Tensor mask = torch::empty_like(z).bernoulli_(0.5, own);
      return torch::dropout((z * mask).tanh(), 0.3, true) * torch::rand_like(z);
    };
    const Tensor y = around([=](const Tensor& z) { return around(block, around(block, z)); }, x);
    y.sum().backward();
    return Tensors{y, x.grad(), torch::rand({4}), torch::empty({4}).uniform_(0, 1, own)};
  });
}

const std::string kOtherDraws =
    "the block of zr::checkpoint did not draw the same random numbers when it was recomputed: another thread drew from "
    "libtorch's default generator during one of the runs (give other threads, such as data loaders, generators of "
    "their "
    "own: at::make_generator<at::CPUGeneratorImpl>(seed)), or train() or eval() was called between forward and "
    "backward "
    "(call it after backward), or the block draws depending on more than its inputs and the model";

// Draws on another thread.
void loader_draws() {
  std::thread([] { torch::rand({2}); }).join();
}

TEST_F(RecomputeTest, ReportsDrawsOfAnotherThread) {
  for (const int disturbed : {0, 1}) {  // the first run, the second run
    int run = 0;
    const Tensor x = input();
    const Tensor y = checkpoint(
        [&](const Tensor& z) {
          const Tensor a = torch::dropout(z, 0.5, true);
          if (run++ == disturbed) loader_draws();
          return torch::dropout(a.exp(), 0.5, true).tanh();
        },
        x);
    const Tensor next = torch::rand({3});
    const Tensor state = at::globalContext().defaultGenerator(at::kCPU).get_state();
    EXPECT_EQ(said_by([&] { y.sum().backward(); }), kOtherDraws);
    EXPECT_TRUE(at::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), state));
  }
}

TEST_F(RecomputeTest, OtherThreadsMayDrawWhileABlockDrawsNothing) {
  const Tensor x = input();
  const Tensor y = checkpoint(
      [&](const Tensor& z) {
        const Tensor a = torch::dropout(z.tanh(), 0.5, false);
        loader_draws();
        return torch::scaled_dot_product_attention(a.view({1, 1, 3, 4}), a.view({1, 1, 3, 4}), a.view({1, 1, 3, 4}));
      },
      x);
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(RecomputeTest, ReportsGradientsThatABlockComputesItself) {
  const Tensor x = input();
  EXPECT_EQ(
      said_by([&] {
        checkpoint(
            [](const Tensor& z) {
              const Tensor energy = (z * 2).pow(3).sum();
              return torch::autograd::grad({energy}, {z}, {}, true, true)[0].tanh();
            },
            x);
      }),
      "backward or torch::autograd::grad ran inside a block of zr::checkpoint, which runs again in backward; call "
      "it outside the block, or take this part out of zr::checkpoint");
}

// It would call hooks that the program registers after it, when the block runs again.
TEST_F(RecomputeTest, ReportsGradientsOfInputsThatABlockComputesItself) {
  for (const bool nested : {false, true}) {
    const Tensor x = input();
    EXPECT_THAT(said_by([&] {
                  const auto squares = [](const Tensor& z) {
                    return torch::autograd::grad({(z * 3).sum()}, {z}, {}, true, true, true)[0] * z;
                  };
                  const Tensor y = nested ? checkpoint([&](const Tensor& z) { return checkpoint(squares, z); }, x)
                                          : checkpoint(squares, x);
                  x.register_hook([](const Tensor& gradient) { return gradient * 2; });
                  y.sum().backward();
                }),
                testing::HasSubstr("torch::autograd::grad ran inside a block of zr::checkpoint"));
  }
}

TEST_F(RecomputeTest, FunctionObjectsStartAllRunsInTheSameState) {
  expect_same([](const Around& around) {
    const Tensor x = input();
    const Tensor y = around([n = 0](const Tensor& z) mutable { return (z * ++n).exp(); }, x);
    y.sum().backward({}, true);
    y.sum().backward();
    return Tensors{y, x.grad()};
  });
}

TEST_F(RecomputeTest, ABlockThatChangesItsInputKeepsNoMemory) {
  std::weak_ptr<int> alive;
  {
    const Tensor x = input() * 2;
    const auto token = std::make_shared<int>(0);
    alive = token;
    checkpoint([token](Tensor z) { return z.mul_(2).tanh(); }, x);
  }
  EXPECT_TRUE(alive.expired());
}

TEST_F(RecomputeTest, TrainAndEvalBetweenForwardAndBackwardAreNamed) {
  torch::nn::Dropout dropout(0.5);
  torch::nn::BatchNorm1d norm(4);
  const Tensor x = input();
  const Tensor a = checkpoint([dropout](const Tensor& z) mutable { return dropout->forward(z.tanh()); }, x);
  const Tensor b = checkpoint([norm](const Tensor& z) mutable { return norm->forward(z).tanh(); }, x);
  dropout->eval();
  norm->eval();
  EXPECT_EQ(said_by([&] { a.sum().backward(); }), kOtherDraws);
  const std::string other = said_by([&] { b.sum().backward(); });
  EXPECT_NE(other.find("train() and eval() after backward"), std::string::npos) << other;
}
}  // namespace
}  // namespace zr::host
