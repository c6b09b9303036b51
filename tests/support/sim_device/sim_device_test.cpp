// The simulated accelerator: values of operators equal the CPU's, work is asynchronous, and errors of ordering show.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <cstring>

#include "support/sim_device/move_to.hpp"

#ifndef ZR_SIM_DEVICE
#define ZR_SIM_DEVICE ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so"
#endif

namespace zr::test::sim {
namespace {

uint64_t (*pending)();
uint64_t (*synchronizations)();
void (*set_delay)(uint64_t, unsigned);

const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(at::kPrivateUse1); }
at::Device sim(int index = 0) { return at::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)); }
void synchronize() { guard().synchronizeDevice(0); }
c10::DeviceAllocator& allocator() { return *c10::getDeviceAllocator(at::kPrivateUse1); }

void load() {
  setenv("ZR_SIM_BYTES", "268435456", 0);
  const char* const path = std::getenv("ZR_SIM_DEVICE");
  void* const library = dlopen(path != nullptr ? path : ZR_SIM_DEVICE, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  pending = reinterpret_cast<uint64_t (*)()>(dlsym(library, "zr_sim_pending"));
  synchronizations = reinterpret_cast<uint64_t (*)()>(dlsym(library, "zr_sim_synchronizations"));
  set_delay = reinterpret_cast<void (*)(uint64_t, unsigned)>(dlsym(library, "zr_sim_set_delay"));
}

class Environment : public ::testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};

class SimDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(3); }
  void TearDown() override {
    set_delay(0, 0);
    for (int i = 0; i < 2; ++i) guard().synchronizeDevice(static_cast<c10::DeviceIndex>(i));
  }
};

void expect_same(const at::Tensor& cpu, const at::Tensor& device, const char* what) {
  ASSERT_EQ(cpu.defined(), device.defined()) << what;
  if (!cpu.defined()) return;
  ASSERT_TRUE(device.device() == sim()) << what;
  const at::Tensor back = device.detach().to(at::kCPU).contiguous(), want = cpu.detach().contiguous();
  ASSERT_EQ(want.sizes(), back.sizes()) << what;
  ASSERT_EQ(want.scalar_type(), back.scalar_type()) << what;
  EXPECT_EQ(cpu.strides(), device.strides()) << what;
  EXPECT_EQ(want.numel() == 0 || std::memcmp(want.data_ptr(), back.data_ptr(), want.nbytes()) == 0, true)
      << what << "\n"
      << want << "\n"
      << back;
}

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

// Results and gradients of `f` are the same bits on both devices.
void compare(const char* what, const Function& f, const Tensors& inputs, bool backward = true) {
  SCOPED_TRACE(what);
  Tensors on_cpu, on_sim;
  for (const at::Tensor& each : inputs) {
    const bool gradient = backward && at::isFloatingType(each.scalar_type());
    on_cpu.push_back(each.detach().clone().requires_grad_(gradient));
    on_sim.push_back(each.detach().to(sim()).requires_grad_(gradient));
  }
  const Tensors a = f(on_cpu), b = f(on_sim);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) expect_same(a[i], b[i], "result");
  if (!backward) return;
  at::Tensor cpu_loss = a[0].to(at::kFloat).square().sum(), sim_loss = b[0].to(at::kFloat).square().sum();
  cpu_loss.backward();
  sim_loss.backward();
  for (std::size_t i = 0; i < inputs.size(); ++i) expect_same(on_cpu[i].grad(), on_sim[i].grad(), "gradient");
}

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

TEST_F(SimDeviceTest, LstmEqualsCpu) {
  for (const bool mkldnn : {true, false}) {
    at::globalContext().setUserEnabledMkldnn(mkldnn);
    const auto options = torch::nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true).batch_first(true);
    torch::nn::LSTM a(options), b(options);
    for (std::size_t i = 0; i < a->parameters().size(); ++i) b->parameters()[i].detach().copy_(a->parameters()[i]);
    move_to(*b, sim());
    b->flatten_parameters();
    at::Tensor x = torch::randn({3, 4, 6}).requires_grad_(), y = x.detach().to(sim()).requires_grad_();
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

TEST_F(SimDeviceTest, OperatorsReturnAtOnce) {
  at::Tensor x = torch::zeros({64}, sim());
  synchronize();
  set_delay(1, 2000);
  const uint64_t waits = synchronizations();
  for (int i = 0; i < 100; ++i) x = x + 1;
  EXPECT_GE(pending(), 50u);
  EXPECT_EQ(synchronizations(), waits);
  EXPECT_EQ(x.sum().item<float>(), 6400);
  EXPECT_GT(synchronizations(), waits);
  synchronize();
  EXPECT_EQ(pending(), 0u);
}

TEST_F(SimDeviceTest, EventOrdersTwoStreams) {
  const c10::Stream first = guard().getDefaultStream(sim()), second = guard().getStreamFromGlobalPool(sim(), false);
  for (const bool wait : {true, false}) {
    synchronize();
    set_delay(7, 0);
    at::Tensor source = torch::ones({256}, sim());
    synchronize();
    set_delay(7, 20000);
    at::Tensor made = source + 1;
    for (int i = 0; i < 5; ++i) made = made + 1;
    c10::Event event(at::kPrivateUse1);
    event.record(first);
    set_delay(7, 0);
    at::Tensor read;
    {
      const c10::StreamGuard on_second(second);
      if (wait) event.block(second);
      read = made * 1;
      guard().synchronizeStream(second);
      const at::Tensor host = read.to(at::kCPU);
      if (wait)
        EXPECT_TRUE(torch::equal(host, torch::full({256}, 7.f)));
      else
        EXPECT_TRUE(host.isnan().all().item<bool>()) << "the first stream has not written the tensor yet";
    }
  }
}

TEST_F(SimDeviceTest, FreedMemoryReadsAsNan) {
  const c10::Stream second = guard().getStreamFromGlobalPool(sim(), false);
  for (const bool recorded : {true, false}) {
    at::Tensor x = torch::ones({1000}, sim());
    synchronize();
    void* const address = x.data_ptr();
    at::Tensor read;
    {
      const c10::StreamGuard on_second(second);
      const at::Tensor busy = torch::ones({1}, sim());
      synchronize();
      set_delay(5, 30000);
      for (int i = 0; i < 5; ++i) busy.add_(1);
      if (recorded) x.record_stream(second);
      read = x * 1;
    }
    x.reset();
    const at::Tensor next = torch::empty({1000}, sim());
    EXPECT_EQ(next.data_ptr() == address, !recorded);
    synchronize();
    EXPECT_EQ(torch::equal(read.to(at::kCPU), torch::ones({1000})), recorded);
    EXPECT_TRUE(next.to(at::kCPU).isnan().all().item<bool>());
    set_delay(0, 0);
  }
}

TEST_F(SimDeviceTest, HostAccessFaults) {
  GTEST_FLAG_SET(death_test_style, "fast");
  const at::Tensor x = torch::ones({4}, sim());
  synchronize();
  EXPECT_EXIT(std::exit(static_cast<int>(*static_cast<volatile float*>(x.data_ptr()))),
              ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(SimDeviceTest, OutOfMemoryThrows) {
  EXPECT_THROW(torch::empty({int64_t{1} << 30}, torch::TensorOptions(sim()).dtype(at::kByte)), c10::OutOfMemoryError);
  allocator().resetPeakStats(0);
  const auto before = allocator().getDeviceStats(0).allocated_bytes[0];
  { const at::Tensor x = torch::empty({1 << 20}, sim()); }
  const auto after = allocator().getDeviceStats(0).allocated_bytes[0];
  EXPECT_EQ(after.current, before.current);
  EXPECT_EQ(after.peak, before.current + (1 << 22));
  for (int i = 1; i < 200; ++i) torch::empty({i * 10000}, sim());
}

TEST_F(SimDeviceTest, GeneratorIsReproducible) {
  const auto draw = [] {
    const at::Tensor x = torch::ones({100}, sim());
    return Tensors{torch::dropout(x, 0.5, true).to(at::kCPU), torch::randn({10}, sim()).to(at::kCPU),
                   torch::randperm(10, torch::TensorOptions(sim()).dtype(at::kLong)).to(at::kCPU),
                   torch::multinomial(x, 3).to(at::kCPU), torch::rand({5}, sim()).to(at::kCPU)};
  };
  torch::manual_seed(11);
  const Tensors first = draw(), next = draw();
  torch::manual_seed(11);
  at::Generator generator = at::globalContext().defaultGenerator(sim());
  const uint64_t waits = synchronizations();
  const at::Tensor state = generator.get_state();
  EXPECT_EQ(generator.current_seed(), 11u);
  EXPECT_EQ(synchronizations(), waits);
  const Tensors again = draw();
  generator.set_state(state);
  const Tensors restored = draw();
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(torch::equal(first[i], again[i])) << i;
    EXPECT_TRUE(torch::equal(first[i], restored[i])) << i;
  }
  EXPECT_FALSE(torch::equal(first[0], next[0]));
  EXPECT_FALSE(torch::equal(first[1], next[1]));
  at::Generator own = at::globalContext().getAcceleratorHooksInterface(at::kPrivateUse1).getNewGenerator(0);
  own.set_current_seed(5);
  const at::Tensor a = torch::empty({8}, sim()).normal_(0, 1, own).to(at::kCPU);
  own.set_current_seed(5);
  EXPECT_TRUE(torch::equal(a, torch::empty({8}, sim()).normal_(0, 1, own).to(at::kCPU)));
}

TEST_F(SimDeviceTest, PinnedCopiesAreAsynchronous) {
  const at::Tensor pinned = torch::zeros({64}).pin_memory(), pageable = torch::zeros({64});
  EXPECT_TRUE(pinned.is_pinned());
  EXPECT_FALSE(pageable.is_pinned());
  at::Tensor x = torch::ones({64}, sim());
  synchronize();
  set_delay(2, 30000);
  for (int i = 0; i < 4; ++i) x.add_(1);
  pinned.copy_(x, /*non_blocking=*/true);
  EXPECT_EQ(pinned[0].item<float>(), 0) << "the copy is pending";
  synchronize();
  EXPECT_EQ(pinned[0].item<float>(), 5);
  for (int i = 0; i < 4; ++i) x.add_(1);
  pageable.copy_(x, /*non_blocking=*/true);
  EXPECT_EQ(pageable[0].item<float>(), 9) << "a copy to pageable memory waits";
  for (int i = 0; i < 4; ++i) x.add_(1);
  x.copy_(pageable, /*non_blocking=*/true);
  pageable.fill_(100);
  EXPECT_EQ(x[0].item<float>(), 9) << "a pageable source is staged";
  for (int i = 0; i < 4; ++i) x.add_(1);
  x.copy_(pinned, /*non_blocking=*/true);
  pinned.fill_(100);
  EXPECT_EQ(x[0].item<float>(), 100) << "a pinned source is read when the copy runs";
}

TEST_F(SimDeviceTest, DevicesDoNotMix) {
  const at::Tensor x = torch::ones({4}, sim());
  EXPECT_THROW(x + torch::ones({4}), c10::Error);
  EXPECT_THROW(x + torch::ones({4}, sim(1)), c10::Error);
  EXPECT_THROW(torch::ones({4}).add_(x), c10::Error);
  EXPECT_THROW(torch::mm(x, x), c10::Error);
  EXPECT_THROW(torch::ones({4}, sim()).add_(torch::ones({3}, sim())), c10::Error);
  set_delay(4, 10000);
  const at::Tensor y = (x + 1).to(sim(1)) * 2;
  EXPECT_EQ(y.device(), sim(1));
  EXPECT_TRUE(torch::equal(y.to(at::kCPU), torch::full({4}, 4.f)));
}

struct Net : torch::nn::Module {
  torch::nn::Embedding words{register_module("words", torch::nn::Embedding(11, 8))};
  torch::nn::LSTM lstm{register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 8).batch_first(true)))};
  torch::nn::LayerNorm norm{register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))};
  torch::nn::Linear up{register_module("up", torch::nn::Linear(8, 16))},
      down{register_module("down", torch::nn::Linear(16, 11))};
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(norm(std::get<0>(lstm(words(x))))))); }
};

std::vector<at::Tensor> train(const at::Device& device) {
  torch::manual_seed(5);
  Net net;
  move_to(net, device);
  const at::Tensor data = torch::randint(11, {5, 4, 7});
  for (int step = 0; step < 5; ++step) {
    const at::Tensor x = data[step].to(device, /*non_blocking=*/true);
    const at::Tensor logits = net.forward(x.narrow(1, 0, 6));
    F::cross_entropy(logits.reshape({-1, 11}), x.narrow(1, 1, 6).reshape({-1})).backward();
    const torch::NoGradGuard no_grad;
    for (at::Tensor& p : net.parameters()) {
      p.sub_(p.grad(), 0.1);
      p.mutable_grad().reset();
    }
  }
  std::vector<at::Tensor> weights;
  for (const at::Tensor& p : net.parameters()) weights.push_back(p.detach());
  return weights;
}

TEST_F(SimDeviceTest, TrainingEqualsCpu) {
  const auto cpu = train(at::kCPU);
  for (const unsigned seed : {0u, 1u, 2u}) {
    set_delay(seed, seed == 0 ? 0 : 200);
    const uint64_t waits = synchronizations();
    const auto device = train(sim());
    EXPECT_LE(synchronizations() - waits, 20u) << "only the copies of parameters wait";
    for (std::size_t i = 0; i < cpu.size(); ++i) expect_same(cpu[i], device[i], "weight");
  }
}

}  // namespace
}  // namespace zr::test::sim

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  zr::test::sim::load();
  ::testing::AddGlobalTestEnvironment(new zr::test::sim::Environment);
  return RUN_ALL_TESTS();
}
