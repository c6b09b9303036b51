// Values of operators on the simulated accelerator equal the CPU's, bit for bit.
#include <ATen/autocast_mode.h>

#include "simulators/sim_device/move_to.hpp"
#include "simulators/sim_device/sim_device_test.hpp"

namespace zr::test::sim {
namespace {

namespace F = torch::nn::functional;

TEST_F(SimDeviceTest, ValuesEqualCpu) {
  const auto r = [](at::IntArrayRef sizes) { return torch::randn(sizes); };
  compare("linear", [](const Tensors& t) { return Tensors{torch::linear(t[0], t[1], t[2])}; },
          {r({5, 7}), r({3, 7}), r({3})});
  compare("linear3d", [](const Tensors& t) { return Tensors{torch::linear(t[0], t[1], t[2])}; },
          {r({2, 5, 7}), r({3, 7}), r({3})});
  compare("matmul", [](const Tensors& t) { return Tensors{torch::matmul(t[0], t[1])}; }, {r({4, 5, 6}), r({6, 3})});
  compare("bmm", [](const Tensors& t) { return Tensors{torch::bmm(t[0], t[1])}; }, {r({4, 5, 6}), r({4, 6, 3})});
  compare("layer_norm", [](const Tensors& t) { return Tensors{torch::layer_norm(t[0], {8}, t[1], t[2])}; },
          {r({5, 8}), r({8}), r({8})});
  compare("gelu", [](const Tensors& t) { return Tensors{torch::gelu(t[0]), torch::gelu(t[0], "tanh")}; }, {r({5, 8})});
  compare("silu", [](const Tensors& t) { return Tensors{torch::silu(t[0])}; }, {r({5, 8})});
  compare("softmax",
          [](const Tensors& t) {
            return Tensors{torch::softmax(t[0], -1), torch::log_softmax(t[0], 0)};
          },
          {r({5, 8})});
  compare("cross_entropy", [](const Tensors& t) { return Tensors{F::cross_entropy(t[0], t[1])}; },
          {r({5, 8}), torch::randint(8, {5})});
  compare("embedding", [](const Tensors& t) { return Tensors{torch::embedding(t[0], t[1])}; },
          {r({9, 4}), torch::randint(9, {3, 5})});
  compare("conv2d", [](const Tensors& t) { return Tensors{torch::conv2d(t[0], t[1], t[2], 1, 1)}; },
          {r({2, 3, 8, 8}), r({4, 3, 3, 3}), r({4})});
  compare("batch_norm",
          [](const Tensors& t) {
            at::Tensor mean = torch::zeros({3}, t[0].device()), var = torch::ones({3}, t[0].device());
            at::Tensor y = torch::batch_norm(t[0], t[1], t[2], mean, var, true, 0.1, 1e-5, false);
            return Tensors{y, mean, var};
          },
          {r({4, 3, 5}), r({3}), r({3})});
  compare("attention",
          [](const Tensors& t) { return Tensors{torch::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0., true)}; },
          {r({2, 2, 6, 8}), r({2, 2, 6, 8}), r({2, 2, 6, 8})});
  compare("index",
          [](const Tensors& t) {
            return Tensors{t[0].index({t[1]}), t[0].index_select(0, t[1]), t[0].gather(0, t[1].unsqueeze(1))};
          },
          {r({6, 4}), torch::randint(6, {3})});
  compare("scatter",
          [](const Tensors& t) {
            return Tensors{torch::zeros({6, 4}, t[0].device()).scatter_add(0, t[1], t[0])};
          },
          {r({3, 4}), torch::randint(6, {3, 4})});
  compare("cat",
          [](const Tensors& t) {
            Tensors all{torch::cat({t[0], t[1]}, 1), torch::stack({t[0], t[1]})};
            for (const at::Tensor& each : t[0].split(2)) all.push_back(each);
            return all;
          },
          {r({5, 8}), r({5, 8})});
  compare("reductions",
          [](const Tensors& t) {
            return Tensors{t[0].var(),    t[0].sum(0), t[0].mean(), t[0].norm(), t[0].amax(1), std::get<0>(t[0].max(1)),
                           t[0].cumsum(1)};
          },
          {r({50, 80})});
  compare("bf16", [](const Tensors& t) { return Tensors{torch::linear(t[0], t[1], t[2])}; },
          {r({5, 7}).to(at::kBFloat16), r({3, 7}).to(at::kBFloat16), r({3}).to(at::kBFloat16)});
  compare("fp16", [](const Tensors& t) { return Tensors{torch::linear(t[0], t[1], t[2])}; },
          {r({5, 7}).to(at::kHalf), r({3, 7}).to(at::kHalf), r({3}).to(at::kHalf)});
  compare("pool",
          [](const Tensors& t) {
            return Tensors{torch::max_pool2d(t[0], 2), torch::adaptive_avg_pool2d(t[0], {2, 2})};
          },
          {r({2, 3, 8, 8})});
  compare("group_norm", [](const Tensors& t) { return Tensors{torch::group_norm(t[0], 2, t[1], t[2])}; },
          {r({2, 4, 6}), r({4}), r({4})});
  compare("rms_norm", [](const Tensors& t) { return Tensors{torch::rms_norm(t[0], {6}, t[1])}; },
          {r({2, 4, 6}), r({6})});
  compare("elementwise",
          [](const Tensors& t) {
            return Tensors{torch::where(t[0] > 0, t[0], t[1]) * 2 + t[1] / 3, t[0].clamp(-1, 1), t[0].exp() - t[1],
                           torch::addcmul(t[0], t[1], t[1], 0.5)};
          },
          {r({5, 8}), r({8})});
  compare("views",
          [](const Tensors& t) {
            return Tensors{t[0].transpose(0, 1).reshape({-1}),
                           t[0].t() * 2,
                           t[0].slice(1, 1, 7, 2).exp(),
                           t[0].permute({1, 0}).contiguous(),
                           t[0].expand({3, 5, 8}),
                           t[0].unfold(1, 3, 2),
                           t[0].diagonal() + 1};
          },
          {r({5, 8})});
}

TEST_F(SimDeviceTest, InPlaceAndFactoriesEqualCpu) {
  compare(
      "in-place",
      [](const Tensors& t) {
        at::Tensor a = t[0].clone(), b = t[1].clone();
        a.add_(b, 0.5).mul_(2).clamp_(-1, 1);
        a.narrow(0, 1, 2).zero_();
        a.select(1, 3).copy_(b.select(1, 0));
        b.t().sub_(1);
        b.index_put_({torch::tensor({0, 2})}, torch::tensor(4.f));
        a.masked_fill_(b > 0, 7);
        at::Tensor out = torch::empty({0}, a.options());
        at::add_out(out, a, b);
        at::Tensor mixed = a + torch::tensor(2.5);
        return Tensors{
            a, b, out, mixed, a.to(at::kHalf), a.to(at::kLong), a.nonzero(), a.masked_select(a > 0), a.index({a > 0})};
      },
      {torch::randn({4, 5}), torch::randn({4, 5})}, false);
  compare(
      "factories",
      [](const Tensors& t) {
        const auto o = t[0].options();
        return Tensors{torch::arange(10, o),   torch::full({2, 2}, 3, o),   torch::eye(3, o),
                       torch::ones_like(t[0]), torch::linspace(0, 1, 7, o), torch::tensor({1.f, 2.f}, o),
                       t[0].new_zeros({3})};
      },
      {torch::randn({4, 5})}, false);
  compare(
      "foreach",
      [](const Tensors& t) {
        Tensors a{t[0].clone(), t[1].clone()};
        at::_foreach_mul_(a, 2.);
        at::_foreach_add_(a, {t[1], t[0]}, 0.5);
        Tensors norms = at::_foreach_norm(a);
        a.insert(a.end(), norms.begin(), norms.end());
        return a;
      },
      {torch::randn({4, 5}), torch::randn({4, 5})}, false);
  const at::Tensor x = torch::ones({2}, sim());
  EXPECT_EQ(x.sum().item<float>(), 2);
  EXPECT_TRUE(torch::equal(x, x.clone()));
}

TEST_F(SimDeviceTest, GradientNormAndClip) {
  at::Tensor a = torch::randn({40}).requires_grad_(), b = a.detach().to(sim()).requires_grad_();
  (a * a * 3).sum().backward();
  (b * b * 3).sum().backward();
  EXPECT_EQ(torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{a}, 1.),
            torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{b}, 1.));
  expect_same(a.grad(), b.grad(), "clipped");
}

// The CPU computes an LSTM by one fused operator per layer if oneDNN supports its dtype on this machine.
TEST_F(SimDeviceTest, LstmEqualsCpu) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const bool fused : {true, false}) {
      SCOPED_TRACE(std::string(c10::toString(type)) + (fused ? ", with oneDNN" : ", without oneDNN"));
      at::globalContext().setUserEnabledMkldnn(fused);
      const auto options = torch::nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true).batch_first(true);
      torch::nn::LSTM a(options), b(options);
      a->to(type);
      b->to(type);
      for (std::size_t i = 0; i < a->parameters().size(); ++i) b->parameters()[i].detach().copy_(a->parameters()[i]);
      move_to(*b, sim());
      b->flatten_parameters();
      at::Tensor x = torch::randn({3, 4, 6}).to(type).requires_grad_(), y = x.detach().to(sim()).requires_grad_();
      {
        const torch::NoGradGuard no_grad;
        expect_same(std::get<0>(a->forward(x)), std::get<0>(b->forward(y)), "output without gradients");
      }
      const auto [ox, hx] = a->forward(x);
      const auto [oy, hy] = b->forward(y);
      expect_same(ox, oy, "output");
      expect_same(std::get<1>(hx), std::get<1>(hy), "cell");
      ox.square().sum().backward();
      oy.square().sum().backward();
      expect_same(x.grad(), y.grad(), "gradient of the input");
      for (std::size_t i = 0; i < a->parameters().size(); ++i)
        expect_same(a->parameters()[i].grad(), b->parameters()[i].grad(), "gradient of a weight");
    }
  at::globalContext().setUserEnabledMkldnn(true);
}

TEST_F(SimDeviceTest, CellsEqualCpu) {
  const auto r = [](at::IntArrayRef sizes) { return torch::randn(sizes); };
  for (const bool biases : {true, false})
    compare(
        biases ? "lstm_cell" : "lstm_cell without biases",
        [biases](const Tensors& t) {
          const auto [h, c] = biases ? torch::lstm_cell(t[0], {t[1], t[2]}, t[3], t[4], t[5], t[6])
                                     : torch::lstm_cell(t[0], {t[1], t[2]}, t[3], t[4]);
          return Tensors{h * c, h, c};
        },
        biases ? Tensors{r({3, 6}), r({3, 5}), r({3, 5}), r({20, 6}), r({20, 5}), r({20}), r({20})}
               : Tensors{r({3, 6}), r({3, 5}), r({3, 5}), r({20, 6}), r({20, 5})});
}

TEST_F(SimDeviceTest, AutocastRoundsProductsOfMatricesAsTheCpuDoes) {
  compare("autocast",
          [](const Tensors& t) {
            const at::DeviceType device = t[0].device().type();
            at::autocast::set_autocast_dtype(device, at::kBFloat16);
            at::autocast::set_autocast_enabled(device, true);
            Tensors all{torch::linear(t[0], t[1], t[2]), torch::matmul(t[0], t[1].t()), torch::mm(t[0], t[1].t()),
                        torch::addmm(t[2], t[0], t[1].t()),
                        torch::bmm(t[0].unsqueeze(0), t[1].t().unsqueeze(0)).tanh()};
            at::autocast::clear_cache();
            at::autocast::set_autocast_enabled(device, false);
            for (const at::Tensor& each : all) EXPECT_EQ(each.scalar_type(), at::kBFloat16);
            return all;
          },
          {torch::randn({5, 7}), torch::randn({3, 7}), torch::randn({3})});
}

}  // namespace
}  // namespace zr::test::sim
