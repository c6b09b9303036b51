// AdamW for CUDA: the bits of its update and of the norm blocks beside those of the CPU, and its time beside the memory
// that it moves and libtorch's fused AdamW.
//   gpu_optimizer FOLDER DEVICE PARAMETERS
// FOLDER has the plug-in zr_optimizer_adamw.so for the device. Prints one line of JSON per figure; exits with 1 if bits
// differ.
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "contract/optimizer_under_test.hpp"
#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/device.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kLr = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.01;
constexpr int64_t kNormBlock = 1024;

// A stream of libtorch, as the host passes it to plug-ins.
struct Stream {
  at::Device device;
  c10::Stream stream;
  explicit Stream(at::Device on) : device(on), stream(c10::impl::VirtualGuardImpl(on.type()).getDefaultStream(on)) {}
  zr_stream* abi() { return reinterpret_cast<zr_stream*>(this); }
  zr_device device_of_views() const {
    return {device.is_cuda() ? int32_t{ZR_DEVICE_CUDA} : int32_t{ZR_DEVICE_EXTENSION}, device.index()};
  }
};
const zr_stream_service kStreams{
    sizeof(zr_stream_service), 0,
    [](zr_stream* stream) { return reinterpret_cast<Stream*>(stream)->stream.native_handle(); },
    [](zr_stream* stream) { return reinterpret_cast<Stream*>(stream)->device_of_views(); }};

zr_host host_with_streams() {
  zr_host host = zr::testing::make_host();
  host.service = [](const zr_host*, const char* id) -> const void* {
    if (std::string(id) == "zr.host.config/1") return &zr::testing::kConfigService;
    if (std::string(id) == "zr.host.async/1") return &zr::testing::kAsyncService;
    return std::string(id) == "zr.host.stream/1" ? &kStreams : nullptr;
  };
  return host;
}

void wait_for(at::Device device) { c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index()); }

zr_view view_of(const torch::Tensor& tensor, zr_dtype dtype, const zr_device& device) {
  return {tensor.defined() ? tensor.data_ptr() : nullptr, tensor.defined() ? tensor.numel() : 0, dtype, 0, device};
}

// The arrays of one parameter.
struct Arrays {
  torch::Tensor weight, master, grad, exp_avg, exp_avg_sq;  // master: undefined for fp32
  zr_dtype dtype;
  Arrays to(at::Device device) const {
    const auto move = [&](const torch::Tensor& tensor) {
      return tensor.defined() ? tensor.to(device, false, true) : tensor;
    };
    return {move(weight), move(master), move(grad), move(exp_avg), move(exp_avg_sq), dtype};
  }
};

// Calls step() once for all parameters. stream: null for host memory.
void update(const zr::testing::OptimizerUnderTest& adamw, std::vector<Arrays>& all, int64_t step, Stream* stream) {
  const zr_device device = stream ? stream->device_of_views() : zr_device{ZR_DEVICE_CPU, 0};
  zr_step job{};
  job.size = sizeof job;
  job.grad_mul = 0.5f;
  job.step = step;
  std::vector<int64_t> counts(all.size());
  std::vector<std::array<zr_view, 2>> slots(all.size());
  std::vector<zr_update_slice> slices(all.size());
  std::vector<const zr_update_slice*> pointers;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Arrays& arrays = all[i];
    counts[i] = arrays.weight.numel();
    slots[i] = {view_of(arrays.exp_avg, ZR_F32, device), view_of(arrays.exp_avg_sq, ZR_F32, device)};
    zr_update_slice& slice = slices[i];
    slice = {};
    slice.size = sizeof slice;
    slice.name = "weight";
    slice.shape = &counts[i];
    slice.ndim = 1;
    slice.count = slice.grad_count = counts[i];
    slice.step = step + static_cast<int64_t>(i % 3);
    slice.lr = kLr * static_cast<double>(1 + i % 2);
    slice.weight = view_of(arrays.weight, arrays.dtype, device);
    slice.master = view_of(arrays.master, ZR_F32, device);
    slice.grad = view_of(arrays.grad, ZR_F32, device);
    slice.slots = slots[i].data();
    pointers.push_back(&slice);
  }
  zr_error error{};
  const zr_code code = adamw.api().step(adamw.self(), &job, pointers.data(), static_cast<uint32_t>(pointers.size()),
                                        stream ? stream->abi() : nullptr, nullptr, &error);
  if (code != ZR_OK) throw std::runtime_error(error.msg);
}

// Values of all magnitudes; a few that are not finite.
torch::Tensor values(int64_t count, std::mt19937_64& random, bool all_finite) {
  torch::Tensor tensor = torch::empty({count});
  auto* const data = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    std::memcpy(data + i, &bits, sizeof bits);
    if (random() % 4 != 0 || (all_finite && !std::isfinite(data[i])))
      data[i] = static_cast<float>(static_cast<int64_t>(random() % 2001) - 1000) * 1e-3f;
  }
  return tensor;
}

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  const torch::Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  return std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

// NaNs of arithmetic have one pattern on the GPU and several on the CPU.
torch::Tensor without_nan_patterns(const torch::Tensor& tensor) {
  return torch::where(tensor.isnan(), torch::full_like(tensor, std::numeric_limits<float>::quiet_NaN()), tensor).cpu();
}

bool updates_have_the_same_bits(const zr::testing::OptimizerUnderTest& adamw, Stream& stream, zr_dtype dtype) {
  const at::ScalarType type = dtype == ZR_F32 ? at::kFloat : dtype == ZR_BF16 ? at::kBFloat16 : at::kHalf;
  std::mt19937_64 random(7);
  std::vector<Arrays> on_cpu;
  for (const int64_t count : {1, 3, 4, 31, 4095, 4096, 4097, 100003, 1 << 20}) {
    const torch::Tensor start = values(count, random, true);
    on_cpu.push_back({dtype == ZR_F32 ? start : start.to(type), dtype == ZR_F32 ? torch::Tensor() : start,
                      values(count, random, false), values(count, random, true).abs() * 1e-3,
                      values(count, random, true).abs() * 1e-6, dtype});
  }
  // More slices than one launch takes.
  for (int i = 0; i < 600; ++i) {
    const torch::Tensor start = values(17 + i, random, true);
    on_cpu.push_back({dtype == ZR_F32 ? start : start.to(type), dtype == ZR_F32 ? torch::Tensor() : start,
                      values(17 + i, random, true), torch::zeros({17 + i}), torch::zeros({17 + i}), dtype});
  }
  std::vector<Arrays> on_device;
  for (const Arrays& arrays : on_cpu) on_device.push_back(arrays.to(stream.device));
  // Addresses that are not aligned to vectors.
  on_cpu.push_back({});
  Arrays& last = on_cpu.back();
  const Arrays &whole = on_cpu[7], &whole_device = on_device[7];
  const auto part = [](const torch::Tensor& t) { return t.defined() ? t.clone().narrow(0, 1, 1001) : t; };
  last = {part(whole.weight), part(whole.master), part(whole.grad), part(whole.exp_avg), part(whole.exp_avg_sq), dtype};
  on_device.push_back({part(whole_device.weight), part(whole_device.master), part(whole_device.grad),
                       part(whole_device.exp_avg), part(whole_device.exp_avg_sq), dtype});
  for (int64_t step = 1; step <= 4; ++step) {
    update(adamw, on_cpu, step, nullptr);
    update(adamw, on_device, step, &stream);
  }
  for (std::size_t i = 0; i < on_cpu.size(); ++i) {
    const Arrays &a = on_cpu[i], &b = on_device[i];
    const bool same =
        same_bits(without_nan_patterns(a.weight), without_nan_patterns(b.weight)) &&
        (!a.master.defined() || same_bits(without_nan_patterns(a.master), without_nan_patterns(b.master))) &&
        same_bits(without_nan_patterns(a.exp_avg), without_nan_patterns(b.exp_avg)) &&
        same_bits(without_nan_patterns(a.exp_avg_sq), without_nan_patterns(b.exp_avg_sq));
    if (!same) {
      std::printf("{\"row\": \"bits\", \"dtype\": %d, \"differs\": %zu}\n", static_cast<int>(dtype), i);
      return false;
    }
  }
  return true;
}

double norm_block(const float* data, int64_t count) {
  double lanes[16] = {}, sum = 0;
  for (int64_t i = 0; i < count; ++i) lanes[i % 16] += static_cast<double>(data[i]) * static_cast<double>(data[i]);
  for (const double lane : lanes) sum += lane;
  return sum;
}

const zr_optimizer_device_api& device_api(const zr::testing::OptimizerUnderTest& adamw) {
  const void* table = adamw.component().extension("zr.optimizer.device/1");
  if (!table) throw std::runtime_error("the plug-in has no extension zr.optimizer.device/1");
  return *static_cast<const zr_optimizer_device_api*>(table);
}

void add_up(const zr::testing::OptimizerUnderTest& adamw, const std::vector<zr_view>& views, const torch::Tensor& sums,
            Stream& stream) {
  const zr_view to = view_of(sums, ZR_F64, stream.device_of_views());
  zr_error error{};
  const zr_code code = device_api(adamw).norm_blocks(adamw.self(), views.data(), static_cast<uint32_t>(views.size()),
                                                     kNormBlock, &to, stream.abi(), &error);
  if (code != ZR_OK) throw std::runtime_error(error.msg);
}

bool norms_have_the_same_bits(const zr::testing::OptimizerUnderTest& adamw, Stream& stream) {
  std::mt19937_64 random(11);
  std::vector<torch::Tensor> tensors, on_device;
  std::vector<zr_view> views;
  std::vector<double> expected;
  for (int i = 0; i < 3000; ++i) {  // more views than one launch takes
    tensors.push_back(values(i < 20 ? 1 + 1013 * i : 1 + i % 40, random, true) * 1e-10);
    for (int64_t first = 0; first < tensors.back().numel(); first += kNormBlock)
      expected.push_back(
          norm_block(tensors.back().data_ptr<float>() + first, std::min(kNormBlock, tensors.back().numel() - first)));
    on_device.push_back(tensors.back().to(stream.device));
    views.push_back(view_of(on_device.back(), ZR_F32, stream.device_of_views()));
  }
  const torch::Tensor sums =
      torch::zeros({static_cast<int64_t>(expected.size())}, torch::dtype(torch::kDouble).device(stream.device));
  add_up(adamw, views, sums, stream);
  return same_bits(sums, torch::from_blob(expected.data(), {static_cast<int64_t>(expected.size())}, torch::kDouble));
}

// The shortest of some times in milliseconds, because nothing else runs on the device.
double shortest(at::Device device, const std::function<void()>& call) {
  double best = 1e300;
  for (int i = 0; i < 12; ++i) {
    wait_for(device);
    const auto start = Clock::now();
    call();
    wait_for(device);
    if (i >= 2) best = std::min(best, std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  return best;
}

void print(const std::string& row, double ms, double reference, const char* of, double target) {
  std::printf(
      "{\"row\": \"%s\", \"ms\": %.3f, \"reference\": \"%s\", \"reference_ms\": %.3f, \"ratio\": %.3f, \"mark\": "
      "%.2f}\n",
      row.c_str(), ms, of, reference, reference / ms, target);
  std::fflush(stdout);
}

void measure(const zr::testing::OptimizerUnderTest& adamw, Stream& stream, int64_t parameters, zr_dtype dtype) {
  const auto on = torch::device(stream.device).dtype(torch::kFloat);
  const at::ScalarType type = dtype == ZR_F32 ? at::kFloat : at::kBFloat16;
  std::vector<Arrays> all;
  constexpr int64_t kTensor = 16 << 20;
  for (int64_t left = parameters; left > 0; left -= kTensor) {
    const int64_t n = std::min(left, kTensor);
    const torch::Tensor start = torch::full({n}, 0.1, on);
    all.push_back({dtype == ZR_F32 ? start : start.to(type), dtype == ZR_F32 ? torch::Tensor() : start,
                   torch::full({n}, 0.01, on), torch::zeros({n}, on), torch::zeros({n}, on), dtype});
  }
  const std::string name = dtype == ZR_F32 ? "fp32" : "bf16";
  const double ours = shortest(stream.device, [&] { update(adamw, all, 3, &stream); });
  const int64_t bytes = (dtype == ZR_F32 ? 28 : 30) * parameters;
  {
    const torch::Tensor from = torch::zeros({bytes / 2}, on.dtype(torch::kByte)), to = torch::empty_like(from);
    print("adamw_cuda_" + name, ours, shortest(stream.device, [&] { to.copy_(from); }),
          "copy of the same bytes on the device", 0.9);
  }
  std::vector<torch::Tensor> weights, grads, averages, squares, steps, low;
  for (const Arrays& arrays : all) {
    weights.push_back(dtype == ZR_F32 ? arrays.weight : arrays.master);
    grads.push_back(arrays.grad);
    averages.push_back(arrays.exp_avg);
    squares.push_back(arrays.exp_avg_sq);
    steps.push_back(torch::ones({}, on));
    low.push_back(arrays.weight);
  }
  print("adamw_cuda_" + name, ours,
        shortest(stream.device,
                 [&] {
                   const torch::NoGradGuard no_grad;
                   at::_fused_adamw_(weights, grads, averages, squares, {}, steps, kLr, kBeta1, kBeta2, kDecay, kEps,
                                     false, false);
                   if (dtype != ZR_F32) at::_foreach_copy_(low, weights);
                 }),
        "libtorch's fused AdamW", 1.0);
  std::vector<zr_view> views;
  for (const Arrays& arrays : all) views.push_back(view_of(arrays.grad, ZR_F32, stream.device_of_views()));
  const torch::Tensor sums =
      torch::zeros({(parameters + kNormBlock - 1) / kNormBlock + std::ssize(all)}, on.dtype(torch::kDouble));
  const double norm = shortest(stream.device, [&] { add_up(adamw, views, sums, stream); });
  const torch::Tensor from = torch::zeros({2 * parameters}, on.dtype(torch::kByte)), to = torch::empty_like(from);
  print("norm_blocks_cuda", norm, shortest(stream.device, [&] { to.copy_(from); }),
        "copy of the same bytes on the device", 0.9);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) throw std::invalid_argument("gpu_optimizer FOLDER DEVICE PARAMETERS");
  const at::Device named(argv[2]);
  Stream stream(at::Device(named.type(), std::max<at::DeviceIndex>(named.index(), 0)));
  (void)torch::zeros({1}, torch::device(stream.device));
  static const zr_host host = host_with_streams();
  const zr::testing::OptimizerUnderTest adamw(
      argv[1], "adamw", {{"beta1", kBeta1}, {"beta2", kBeta2}, {"eps", kEps}, {"weight_decay", kDecay}}, {}, &host);
  bool same = true;
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) same &= updates_have_the_same_bits(adamw, stream, dtype);
  same &= norms_have_the_same_bits(adamw, stream);
  std::printf("{\"row\": \"bits of AdamW and norm blocks beside the CPU's\", \"equal\": %s}\n",
              same ? "true" : "false");
  const int64_t parameters = std::stoll(argv[3]);
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16})
    if (parameters > 0) measure(adamw, stream, parameters, dtype);
  return same ? 0 : 1;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "gpu_optimizer: %s\n", failure.what());
  return 1;
}
