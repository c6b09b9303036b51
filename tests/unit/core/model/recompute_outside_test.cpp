// Blocks of zr::checkpoint that make, change or assign tensors and generators in other ways than by operators alone.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_nested_tensor_from_tensor_list.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <functional>

#include "support/said_by.hpp"
#include "zr/recompute.hpp"

namespace zr::host::recompute_outside {
namespace {

using test::said_by;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Block = std::function<Tensor(const Tensor&)>;

Tensor input() { return torch::arange(12, torch::kFloat).view({3, 4}).sin_().requires_grad_(); }

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// The block's result and gradient, and what `state` returns afterwards.
using State = std::function<Tensors()>;
Tensors train(const Block& block, bool checkpointed, const State& state) {
  torch::manual_seed(5);
  const Tensor leaf = input(), x = leaf * 1.5;
  const Tensor y = checkpointed ? checkpoint(block, x) : block(x);
  y.sum().backward();
  Tensors results{y.detach(), leaf.grad(), torch::rand({3})};
  for (const Tensor& tensor : state()) results.push_back(tensor.clone());
  return results;
}

// Expects the same results in zr::checkpoint. `make` makes the block and what it changes.
struct Made {
  Block block;
  State state = [] { return Tensors{}; };
};
void expect_same(const std::function<Made()>& make) {
  const Made plain = make(), again = make();
  const Tensors expected = train(plain.block, false, plain.state), results = train(again.block, true, again.state);
  ASSERT_EQ(expected.size(), results.size());
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(expected[i], results[i])) << i << "\n" << expected[i] << "\n" << results[i];
}
void expect_same_block(const Block& block) {
  expect_same([&] { return Made{block}; });
}

std::string error_of(
    const Block& block, const std::function<void()>& after_forward = [] {}) {
  const Tensor y = checkpoint(block, input() * 1.5);
  after_forward();
  return said_by([&] { y.sum().backward(); });
}

TEST(RecomputeOutsideTest, BlocksChangeTensorsOfFactoriesInPlace) {
  expect_same_block([](const Tensor& z) {
    Tensor h = torch::zeros_like(z);
    h.add_(z);
    return h.tanh();
  });
  expect_same_block([](const Tensor& z) {
    Tensor sum = torch::zeros({4}), all = torch::empty({3, 4}), product = torch::full({4}, 2.0);
    for (int64_t i = 0; i < 3; ++i) {
      sum += z[i].tanh();
      all[i] = z[i] + sum;
    }
    product *= z[0];
    return all.exp() * product * sum;
  });
  expect_same_block([](const Tensor& z) {
    Tensor h = torch::ones({3, 4}), g = torch::zeros({3, 4}), r = torch::rand({3, 4}),
           n = torch::arange(12.0f).view({3, 4});
    h.slice(0, 0, 2).copy_(z.slice(0, 1, 3));
    g.index_put_({torch::tensor({0, 2})}, z.slice(0, 0, 2));
    g.index_add_(0, torch::tensor({0, 1, 0}), z);
    r.mul_(z).add_(torch::tensor({1.f, 2.f, 3.f, 4.f}).mul_(z[1]));
    n.data().mul_(0.5);
    n.index_put_({0, 1}, 2.0);
    return (h * g * r * n).tanh();
  });
}

TEST(RecomputeOutsideTest, BlocksChangeMemoryThatTheyOnlyBorrow) {
  expect_same_block([](const Tensor& z) {
    std::vector<float> memory(4, 1.5f);
    const Tensor t = torch::from_blob(memory.data(), {4});
    t.mul_(2);
    return (z * t.clone()).tanh() * z;
  });
  expect_same_block([](const Tensor& z) {
    std::vector<float> memory(12, 1.5f);
    const Tensor t = torch::from_blob(memory.data(), {3, 4});
    t.mul_(z);
    return t.exp() * z;
  });
  std::vector<float> memory(4, 1.5f);
  const Tensor captured = torch::from_blob(memory.data(), {4});
  EXPECT_EQ(
      error_of([captured](const Tensor& z) { return (z * captured.mul_(2)).tanh() * z; }),
      "the block of zr::checkpoint changes a tensor [4] in place, whose memory libtorch does not own (from_blob), "
      "so it cannot be recomputed; give from_blob a deleter that keeps the memory alive, or change a clone()");
}

TEST(RecomputeOutsideTest, GeneratorsOfABlock) {
  expect_same_block([](const Tensor& z) {
    Tensor h = z;
    for (uint64_t i = 0; i < 3; ++i) h = (h * torch::rand(h.sizes(), generator(7 + i))).tanh();
    return h;
  });
  expect_same([] {
    const at::Generator own = generator(7);
    return Made{[own](const Tensor& z) { return (z * torch::rand(z.sizes(), own.clone())).tanh(); },
                [own] { return Tensors{own.get_state()}; }};
  });
  expect_same([] {  // advances the generator, though the result is known
    const at::Generator own = generator(7);
    return Made{[own](const Tensor& z) { return (z + torch::empty_like(z).bernoulli_(0.0, own)).tanh() * z; },
                [own] { return Tensors{own.get_state()}; }};
  });
}

TEST(RecomputeOutsideTest, LayoutsOfCapturedTensorsChangeOnce) {
  expect_same([] {
    const Tensor b = torch::arange(16, torch::kFloat).view({4, 4});
    return Made{[b](const Tensor& z) { return torch::mm(z, b.t_()).tanh() * z * b.slice(0, 0, 3); },
                [b] { return Tensors{b}; }};
  });
  expect_same([] {
    const Tensor b = torch::ones({2});
    return Made{[b](const Tensor& z) { return (z * b.resize_({4}).fill_(2)).tanh() * z; }, [b] { return Tensors{b}; }};
  });
  expect_same([] {
    const Tensor b = torch::empty({0});
    return Made{[b](const Tensor& z) {
                  {
                    const torch::NoGradGuard no_grad;
                    Tensor out = b;
                    torch::exp_out(out, z[0].detach());
                  }
                  return (z * b).tanh() * z;
                },
                [b] { return Tensors{b}; }};
  });
}

const char* const kContinues =
    "the block of zr::checkpoint reads a tensor [4] from a variable and assigns a new tensor to it, so it would "
    "continue "
    "from the result of its first run when it is recomputed; change the tensor in place, such as with copy_() under "
    "torch::NoGradGuard, or assign it outside the block";
const char* const kOtherTensor =
    "the block of zr::checkpoint uses a tensor [4] when it is recomputed, which it did not use in its first run: a "
    "variable that it reads was assigned another tensor after the block had run, or set_data() gave a tensor other "
    "memory; do this after backward, or pass the tensor as an input";

TEST(RecomputeOutsideTest, ReportsVariablesThatABlockAssigns) {
  const auto mean = std::make_shared<Tensor>(torch::zeros({4}));
  const Block block = [mean](const Tensor& z) {
    for (int i = 0; i < 20; ++i) z.detach() * i;  // whose memory the next ones reuse
    *mean = *mean * 0.9 + z.detach().mean(0) * 0.1;
    return (z - *mean).square().tanh();
  };
  EXPECT_EQ(error_of(block), kContinues);
  EXPECT_EQ(error_of(block, [&] { block(input()); }), kContinues);  // its first result exists no longer
  const auto sum = std::make_shared<Tensor>();
  EXPECT_EQ(error_of([sum](const Tensor& z) {
              *sum = sum->defined() ? *sum + z.detach().mean(0) : z.detach().mean(0);
              return (z - *sum).square().tanh();
            }),
            kContinues);
  const Tensor b = torch::ones({4});
  EXPECT_EQ(error_of([b](const Tensor& z) mutable {
              b.set_data(b * 1.5);
              return (z * b).tanh();
            }),
            kContinues);
}

TEST(RecomputeOutsideTest, ReportsVariablesThatTheProgramAssignsBeforeBackward) {
  const auto mask = std::make_shared<Tensor>(torch::ones({4}));
  EXPECT_EQ(error_of([mask](const Tensor& z) { return (z * *mask).tanh(); }, [&] { *mask = torch::zeros({4}); }),
            kOtherTensor);
  const Tensor b = torch::ones({4});
  EXPECT_EQ(error_of([b](const Tensor& z) { return (z * b).tanh(); }, [&] { b.set_data(torch::zeros({4})); }),
            kOtherTensor);
}

TEST(RecomputeOutsideTest, BlocksMayKeepCachesAndRecordResults) {
  expect_same([] {
    const auto cache = std::make_shared<Tensor>(), last = std::make_shared<Tensor>();
    const Tensor frequencies = torch::arange(4, torch::kFloat);
    return Made{[=](const Tensor& z) {
                  if (!cache->defined()) *cache = torch::outer(torch::arange(8, torch::kFloat), frequencies).cos();
                  const Tensor y = z * cache->slice(0, 0, 3) + frequencies.data();
                  *last = y.detach();
                  return y.tanh() * y;
                },
                [=] {
                  return Tensors{*cache, *last};
                }};
  });
}

TEST(RecomputeOutsideTest, ReportsChangesThatDependOnAVariable) {
  const auto first = std::make_shared<bool>(true);
  const Tensor b = torch::ones({4});
  EXPECT_EQ(error_of([=](const Tensor& z) {
              if (*first) b.add_(z.detach().mean(0));
              *first = false;
              return (z * b.mul_(0.5)).tanh() * z;
            }),
            "the block of zr::checkpoint changed a tensor [4] in place, but not as often when it was recomputed as in "
            "its first run; the block may depend only on its inputs and on tensors, not on variables that it changes");
}

TEST(RecomputeOutsideTest, ReportsOtherOperators) {
  const std::string rule =
      "; both runs must execute the same operators, so the block may depend only on its inputs and the model: call "
      "train() and eval() after backward; for a TorchScript module, whose profiling executor changes the operators "
      "between its calls, call torch::jit::setGraphExecutorOptimize(false) before its first forward";
  const auto runs = std::make_shared<int>(0);
  EXPECT_EQ(error_of([runs](const Tensor& z) { return ++*runs == 1 ? z.tanh() : z.tanh().exp(); }),
            "the block of zr::checkpoint saved 2 tensors when it was recomputed, but 1 in its first run" + rule);
  EXPECT_EQ(error_of([runs](const Tensor& z) { return (++*runs == 3 ? z : z[0]).tanh(); }),
            "the block of zr::checkpoint saved tensors of other shapes or types when it was recomputed than in its "
            "first run" +
                rule);
}

TEST(RecomputeOutsideTest, TorchScriptWithoutProfiling) {
  torch::jit::setGraphExecutorOptimize(false);
  expect_same([] {
    torch::jit::Module module("m");
    module.register_parameter("w", torch::linspace(-1, 1, 16).view({4, 4}).clone().requires_grad_(), false);
    module.define(
        "def forward(self, x):\n  y = torch.tanh(torch.mm(x, self.w))\n"
        "  return y * torch.sigmoid(y) + torch.dropout(y, 0.3, True)\n");
    return Made{[module](const Tensor& z) {
                  torch::jit::Module copy = module;
                  return copy.forward({z}).toTensor() * copy.forward({z}).toTensor();
                },
                [module] { return Tensors{module.attr("w").toTensor().grad()}; }};
  });
  torch::jit::setGraphExecutorOptimize(true);
}

TEST(RecomputeOutsideTest, NestedTensorsInABlock) {
  expect_same_block([](const Tensor& z) {
    const Tensor nested = at::_nested_tensor_from_tensor_list({z.slice(0, 0, 1), z.slice(0, 1, 3)});
    return at::nested_to_padded_tensor(nested.relu(), 0.0);
  });
}

TEST(RecomputeOutsideTest, NamesTheMaximumNormOfAnEmbedding) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 4).max_norm(0.5));
  EXPECT_EQ(
      error_of([embedding](const Tensor& z) mutable {
        return (z * embedding->forward(torch::tensor({1, 2, 5}))).tanh();
      }),
      "the block of zr::checkpoint changes a parameter [10, 4] in place, to apply an Embedding's max_norm "
      "(torch::embedding_renorm_), so it cannot be recomputed; call the Embedding outside the block, or leave out "
      "max_norm");
}

}  // namespace
}  // namespace zr::host::recompute_outside
