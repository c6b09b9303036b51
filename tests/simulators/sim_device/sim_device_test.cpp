// The simulated accelerator: work is asynchronous, and errors of ordering show.
#include "simulators/sim_device/sim_device_test.hpp"

#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <future>

#include "simulators/sim_device/move_to.hpp"

#ifndef ZR_SIM_DEVICE
#define ZR_SIM_DEVICE ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so"
#endif

namespace zr::test::sim {
namespace {

namespace F = torch::nn::functional;

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
  enqueue = reinterpret_cast<decltype(enqueue)>(dlsym(library, "zr_sim_enqueue"));
  native_stream = reinterpret_cast<decltype(native_stream)>(dlsym(library, "zr_sim_stream"));
  set_late = reinterpret_cast<decltype(set_late)>(dlsym(library, "zr_sim_set_late"));
}

class Environment : public ::testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};

// A task that holds its stream until it is opened.
class Gate {
 public:
  explicit Gate(void* stream) {
    enqueue(
        stream, "gate", [](void* gate) { static_cast<Gate*>(gate)->opened_.get_future().wait(); }, this);
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

TEST_F(SimDeviceTest, OperatorsReturnBeforeTheFirstRuns) {
  at::Tensor x = torch::zeros({64}, sim());
  synchronize();
  ASSERT_EQ(pending(), 0u);
  const uint64_t waits = synchronizations();
  Gate gate(native_stream(0, 0));
  for (int i = 0; i < 100; ++i) x.add_(1);
  EXPECT_EQ(pending(), 101u) << "the gate and each operator";
  for (int i = 0; i < 100; ++i) x = x + 1;
  EXPECT_GE(pending(), 201u) << "and the tasks that fill memory with NaN";
  EXPECT_EQ(synchronizations(), waits);
  gate.open();
  EXPECT_EQ(x.sum().item<float>(), 64 * 200);
  EXPECT_GT(synchronizations(), waits);
  synchronize();
  EXPECT_EQ(pending(), 0u);
}

TEST_F(SimDeviceTest, LateTasksRunWhenNothingIsLateAnyMore) {
  for (int i = 0; i < 20; ++i) {
    std::promise<void> ran;
    set_late(1);
    enqueue(
        native_stream(0, 1), "late", [](void* promise) { static_cast<std::promise<void>*>(promise)->set_value(); },
        &ran);
    set_late(0);
    const std::future_status state = ran.get_future().wait_for(std::chrono::seconds(60));
    synchronize();  // ends the task in any case
    ASSERT_EQ(state, std::future_status::ready) << "round " << i;
  }
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
