// The fixture of the tests of the simulated accelerator, the functions of its library, and comparisons with the CPU.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>

namespace zr::test::sim {

inline uint64_t (*pending)();
inline uint64_t (*synchronizations)();
inline void (*set_delay)(uint64_t, unsigned);
inline void (*enqueue)(void* native_stream, const char* name, void (*run)(void*), void* context);
inline void* (*native_stream)(int device, int id);  // id 0: the default stream
inline void (*set_late)(int);

inline const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(at::kPrivateUse1); }
inline at::Device sim(int index = 0) { return at::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)); }
inline void synchronize() { guard().synchronizeDevice(0); }
inline c10::DeviceAllocator& allocator() { return *c10::getDeviceAllocator(at::kPrivateUse1); }

class SimDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(3); }
  void TearDown() override {
    set_delay(0, 0);
    for (int i = 0; i < 2; ++i) guard().synchronizeDevice(static_cast<c10::DeviceIndex>(i));
  }
};

inline void expect_same(const at::Tensor& cpu, const at::Tensor& device, const char* what) {
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
inline void compare(const char* what, const Function& f, const Tensors& inputs, bool backward = true) {
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

}  // namespace zr::test::sim
