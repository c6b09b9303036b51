// The optimizers for CUDA: the bits of their updates and of the norm blocks beside those of the CPU, and their times
// beside a copy of the memory that they move, for AdamW also libtorch's fused one.
//   gpu_optimizer FOLDER DEVICE LIBRARY PARAMETERS [small]
// FOLDER has the optimizers' plug-ins for the device, LIBRARY is libtorch's backend for it. PARAMETERS: of the parts
// that are timed; 0: none. small: bits of small parameters only. Prints one line of JSON per figure; exits with 1 if
// bits differ.
#include <ATen/ops/_fused_adamw.h>
#include <dlfcn.h>
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
#include "gpu/row.hpp"
#include "gpu/torch_stream.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using zr::testing::host_with_streams, zr::testing::view_of, zr::testing::wait_for;
using zr::testing::OptimizerUnderTest, zr::testing::Stream;
constexpr double kLr = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.01;
constexpr int64_t kNormBlock = 1024;

// An optimizer with these keys.
struct Case {
  std::string name, id;
  zr::testing::Values keys;
};
const std::vector<Case> kCases = {
    {"adamw", "adamw", {{"beta1", kBeta1}, {"beta2", kBeta2}, {"eps", kEps}, {"weight_decay", kDecay}}},
    {"adamw8bit", "adamw8bit", {{"min_8bit_elements", 20}}},
    {"sgd", "sgd", {}},
    {"sgd_with_decay", "sgd", {{"weight_decay", kDecay}}},
    {"sgd_with_momentum", "sgd", {{"momentum", 0.9}, {"dampening", 0.5}, {"weight_decay", kDecay}}},
    {"sgd_with_nesterov", "sgd", {{"momentum", 0.9}, {"nesterov", 1}}},
};

struct Arrays {                        // of one parameter
  torch::Tensor weight, master, grad;  // master: undefined for fp32
  std::vector<torch::Tensor> states;
  // Calls fn on every tensor and returns the results.
  template <class Fn>
  Arrays transformed(const Fn& fn) const {
    Arrays other{fn(weight), master.defined() ? fn(master) : master, fn(grad), {}};
    for (const torch::Tensor& state : states) other.states.push_back(fn(state));
    return other;
  }
  Arrays to(at::Device device) const {
    return transformed([&](const torch::Tensor& tensor) { return tensor.to(device, false, true); });
  }
  // Bytes that an update reads and writes.
  int64_t bytes() const {
    auto total = static_cast<int64_t>(weight.nbytes() + grad.nbytes() +
                                      (master.defined() ? 2 * master.nbytes() : weight.nbytes()));
    for (const torch::Tensor& state : states) total += 2 * static_cast<int64_t>(state.nbytes());
    return total;
  }
};

// Calls step() once for all parameters. stream: null for host memory.
void update(const OptimizerUnderTest& optimizer, std::vector<Arrays>& all, int64_t step, Stream* stream) {
  const zr_device device = stream ? stream->device_of_views() : zr_device{ZR_DEVICE_CPU, 0};
  zr_step job{};
  job.size = sizeof job;
  job.grad_mul = 0.5f;
  job.step = step;
  std::vector<int64_t> counts(all.size());
  std::vector<std::vector<zr_view>> slots(all.size());
  std::vector<zr_update_slice> slices(all.size());
  std::vector<const zr_update_slice*> pointers;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Arrays& arrays = all[i];
    counts[i] = arrays.weight.numel();
    for (const torch::Tensor& state : arrays.states) slots[i].push_back(view_of(state, device));
    zr_update_slice& slice = slices[i];
    slice = {};
    slice.size = sizeof slice;
    slice.name = "weight";
    slice.shape = &counts[i];
    slice.ndim = 1;
    slice.count = slice.grad_count = counts[i];
    slice.step = step + static_cast<int64_t>(i % 3);
    slice.lr = kLr * static_cast<double>(1 + i % 2);
    slice.weight = view_of(arrays.weight, device);
    slice.master = view_of(arrays.master, device);
    slice.grad = view_of(arrays.grad, device);
    slice.slots = slots[i].data();
    pointers.push_back(&slice);
  }
  zr_error error{};
  const zr_code code =
      optimizer.api().step(optimizer.self(), &job, pointers.data(), static_cast<uint32_t>(pointers.size()),
                           stream ? stream->abi() : nullptr, nullptr, &error);
  if (code != ZR_OK) throw std::runtime_error(error.msg);
}

// The states of a parameter of `count` elements: zero.
std::vector<torch::Tensor> zero_states(const OptimizerUnderTest& optimizer, int64_t count, at::Device device) {
  zr_param parameter = OptimizerUnderTest::a_parameter();
  parameter.shape = &count;
  parameter.count = count;
  const zr_optimizer_desc description = optimizer.describe(parameter);
  std::vector<torch::Tensor> states;
  for (uint32_t i = 0; i < description.n_slots; ++i) {
    const zr_slot& slot = description.slots[i];
    const int64_t block = std::max<int64_t>(slot.block, 1);
    states.push_back(torch::zeros({(count + block - 1) / block},
                                  torch::device(device).dtype(slot.dtype == ZR_U8 ? at::kByte : at::kFloat)));
  }
  return states;
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

// The parameter's arrays on the CPU. NaNs of arithmetic have one pattern on the GPU and several on the CPU.
Arrays without_nan_patterns(const Arrays& arrays) {
  return arrays.transformed([](const torch::Tensor& tensor) {
    if (!tensor.is_floating_point()) return tensor.cpu();
    return torch::where(tensor.isnan(), torch::full_like(tensor, std::numeric_limits<float>::quiet_NaN()), tensor)
        .cpu();
  });
}

bool same_bits(const Arrays& a, const Arrays& b) {
  const Arrays x = without_nan_patterns(a), y = without_nan_patterns(b);
  bool same = same_bits(x.weight, y.weight) && (!x.master.defined() || same_bits(x.master, y.master));
  for (std::size_t i = 0; i < x.states.size(); ++i) same = same && same_bits(x.states[i], y.states[i]);
  return same;
}

// Of all magnitudes: fp32 states, codes, and scales, which are the states that have fewer elements. The second and the
// fourth state are those of squares.
std::vector<torch::Tensor> states(const OptimizerUnderTest& optimizer, int64_t count, std::mt19937_64& random) {
  std::vector<torch::Tensor> all = zero_states(optimizer, count, at::kCPU);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool squares = i % 2 == 1;
    if (all[i].scalar_type() == at::kByte) {
      auto* const codes = all[i].mutable_data_ptr<uint8_t>();
      for (int64_t e = 0; e < count; ++e) codes[e] = static_cast<uint8_t>(random());
    } else {
      all[i] = values(all[i].numel(), random, true) * (squares ? 1e-6 : 1e-3);
      if (squares || i > 1) all[i] = all[i].abs();
    }
  }
  return all;
}

// small: fewer parameters.
bool updates_have_the_same_bits(const OptimizerUnderTest& optimizer, const std::string& name, Stream& stream,
                                at::ScalarType dtype, bool small) {
  std::mt19937_64 random(7);
  std::vector<Arrays> on_cpu;
  const auto add = [&](int64_t count, bool all_finite, std::vector<torch::Tensor> its_states) {
    const torch::Tensor start = values(count, random, true);
    on_cpu.push_back({start.to(dtype, false, true), dtype == at::kFloat ? torch::Tensor() : start,
                      values(count, random, all_finite), std::move(its_states)});
  };
  for (const int64_t count : {1, 3, 4, 31, 4095, 4096, 4097, small ? 20011 : 100003, small ? 1 : 1 << 20})
    add(count, false, states(optimizer, count, random));
  // More slices than one launch takes.
  for (int64_t i = 0; i < (small ? 40 : 600); ++i) add(17 + i, true, zero_states(optimizer, 17 + i, at::kCPU));
  // Addresses that are not aligned to vectors: 1001 elements of a parameter, and the scales of as many.
  const Arrays &large = on_cpu[7], whole = large.transformed([](const torch::Tensor&tensor) { return tensor.clone(); });
  std::vector<Arrays> on_device;
  for (const Arrays& arrays : on_cpu) on_device.push_back(arrays.to(stream.device));
  const auto part = [](const torch::Tensor& tensor) { return tensor.narrow(0, 1, tensor.numel() > 1001 ? 1001 : 4); };
  on_cpu.push_back(whole.transformed(part));
  on_device.push_back(whole.to(stream.device).transformed(part));
  for (int64_t step = 1; step <= 4; ++step) {
    update(optimizer, on_cpu, step, nullptr);
    update(optimizer, on_device, step, &stream);
  }
  for (std::size_t i = 0; i < on_cpu.size(); ++i)
    if (!same_bits(on_cpu[i], on_device[i])) {
      std::printf("{\"row\": \"bits\", \"optimizer\": \"%s\", \"dtype\": \"%s\", \"differs\": %zu}\n", name.c_str(),
                  c10::toString(dtype), i);
      return false;
    }
  return true;
}

double norm_block(const float* data, int64_t count) {
  double lanes[16] = {}, sum = 0;
  for (int64_t i = 0; i < count; ++i) lanes[i % 16] += static_cast<double>(data[i]) * static_cast<double>(data[i]);
  for (const double lane : lanes) sum += lane;
  return sum;
}

const zr_optimizer_device_api& device_api(const OptimizerUnderTest& optimizer) {
  const void* table = optimizer.component().extension("zr.optimizer.device/1");
  if (!table) throw std::runtime_error("the plug-in has no extension zr.optimizer.device/1");
  return *static_cast<const zr_optimizer_device_api*>(table);
}

void add_up(const OptimizerUnderTest& optimizer, const std::vector<zr_view>& views, const torch::Tensor& sums,
            Stream& stream) {
  const zr_view to = view_of(sums, stream.device_of_views());
  zr_error error{};
  const zr_code code = device_api(optimizer).norm_blocks(
      optimizer.self(), views.data(), static_cast<uint32_t>(views.size()), kNormBlock, &to, stream.abi(), &error);
  if (code != ZR_OK) throw std::runtime_error(error.msg);
}

bool norms_have_the_same_bits(const OptimizerUnderTest& optimizer, Stream& stream, bool small) {
  std::mt19937_64 random(11);
  std::vector<torch::Tensor> tensors, on_device;
  std::vector<zr_view> views;
  std::vector<double> expected;
  for (int i = 0; i < (small ? 100 : 3000); ++i) {  // more views than one launch takes
    tensors.push_back(values(i < 20 ? 1 + 1013 * i : 1 + i % 40, random, true) * 1e-10);
    for (int64_t first = 0; first < tensors.back().numel(); first += kNormBlock)
      expected.push_back(
          norm_block(tensors.back().data_ptr<float>() + first, std::min(kNormBlock, tensors.back().numel() - first)));
    on_device.push_back(tensors.back().to(stream.device));
    views.push_back(view_of(on_device.back(), stream.device_of_views()));
  }
  const torch::Tensor sums =
      torch::zeros({static_cast<int64_t>(expected.size())}, torch::dtype(torch::kDouble).device(stream.device));
  add_up(optimizer, views, sums, stream);
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

void print(const std::string& row, double ms, double reference, const std::string& of, double mark) {
  const std::string times = "\"ms\": " + std::to_string(ms) + ", \"reference\": \"" + of +
                            "\", \"reference_ms\": " + std::to_string(reference);
  zr::testing::print_ratio("\"row\": \"" + row + "\", " + times, reference / ms, {mark});
}

std::vector<Arrays> parameters_of(const OptimizerUnderTest& optimizer, at::Device device, int64_t parameters,
                                  at::ScalarType dtype) {
  const auto on = torch::device(device).dtype(torch::kFloat);
  std::vector<Arrays> all;
  constexpr int64_t kTensor = 16 << 20;
  for (int64_t left = parameters; left > 0; left -= kTensor) {
    const int64_t n = std::min(left, kTensor);
    const torch::Tensor start = torch::full({n}, 0.1, on);
    all.push_back({start.to(dtype), dtype == at::kFloat ? torch::Tensor() : start, torch::full({n}, 0.01, on),
                   zero_states(optimizer, n, device)});
  }
  return all;
}

// Prints the time beside a copy of the bytes that an update moves, and returns it.
double measure(const OptimizerUnderTest& optimizer, const std::string& name, Stream& stream, std::vector<Arrays>& all) {
  const double ours = shortest(stream.device, [&] { update(optimizer, all, 3, &stream); });
  int64_t bytes = 0;
  for (const Arrays& arrays : all) bytes += arrays.bytes();
  const torch::Tensor from = torch::zeros({bytes / 2}, torch::device(stream.device).dtype(torch::kByte)),
                      to = torch::empty_like(from);
  print(name, ours, shortest(stream.device, [&] { to.copy_(from); }), "copy of the same bytes on the device", 0.9);
  return ours;
}

// ours: the time of AdamW for the same parameters, which has the name `name`.
void compare_with_libtorch(const std::string& name, double ours, Stream& stream, const std::vector<Arrays>& all) {
  const auto on = torch::device(stream.device).dtype(torch::kFloat);
  std::vector<torch::Tensor> weights, grads, averages, squares, steps, low;
  for (const Arrays& arrays : all) {
    weights.push_back(arrays.master.defined() ? arrays.master : arrays.weight);
    grads.push_back(arrays.grad);
    averages.push_back(arrays.states[0]);
    squares.push_back(arrays.states[1]);
    steps.push_back(torch::ones({}, on));
    low.push_back(arrays.weight);
  }
  print(name, ours,
        shortest(stream.device,
                 [&] {
                   const torch::NoGradGuard no_grad;
                   at::_fused_adamw_(weights, grads, averages, squares, {}, steps, kLr, kBeta1, kBeta2, kDecay, kEps,
                                     false, false);
                   if (all.front().master.defined()) at::_foreach_copy_(low, weights);
                 }),
        "libtorch's fused AdamW", 1.0);
}

void measure_norm_blocks(const OptimizerUnderTest& optimizer, Stream& stream, const std::vector<Arrays>& all) {
  std::vector<zr_view> views;
  int64_t elements = 0;
  for (const Arrays& arrays : all) {
    views.push_back(view_of(arrays.grad, stream.device_of_views()));
    elements += arrays.grad.numel();
  }
  const auto on = torch::device(stream.device);
  const torch::Tensor sums = torch::zeros({elements / kNormBlock + std::ssize(all)}, on.dtype(torch::kDouble));
  const double norm = shortest(stream.device, [&] { add_up(optimizer, views, sums, stream); });
  const torch::Tensor from = torch::zeros({2 * elements}, on.dtype(torch::kByte)), to = torch::empty_like(from);
  print("norm_blocks_cuda", norm, shortest(stream.device, [&] { to.copy_(from); }),
        "copy of the same bytes on the device", 0.9);
}

void measure_all(const OptimizerUnderTest& optimizer, const Case& one, Stream& stream, int64_t parameters) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<Arrays> all = parameters_of(optimizer, stream.device, parameters, dtype);
    const std::string name = one.name + "_cuda_" + (dtype == at::kFloat ? "fp32" : "bf16");
    const double ours = measure(optimizer, name, stream, all);
    if (one.id != "adamw") continue;
    compare_with_libtorch(name, ours, stream, all);
    measure_norm_blocks(optimizer, stream, all);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  zr::testing::print_each_line_at_once();
  const bool small = argc == 6 && std::string(argv[5]) == "small";
  if (argc != 5 && !small) throw std::invalid_argument("gpu_optimizer FOLDER DEVICE LIBRARY PARAMETERS [small]");
  // Before libtorch looks for devices. Not by LD_PRELOAD, which compute-sanitizer needs for itself.
  if (!::dlopen(argv[3], RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(::dlerror());
  const at::Device named(argv[2]);
  Stream stream(at::Device(named.type(), std::max<at::DeviceIndex>(named.index(), 0)));
  (void)torch::zeros({1}, torch::device(stream.device));
  static const zr_host host = host_with_streams();
  const int64_t parameters = std::stoll(argv[4]);
  bool all_same = true;
  for (const Case& one : kCases) {
    const OptimizerUnderTest optimizer(argv[1], one.id, one.keys, {}, &host);
    bool same = true;
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf})
      same = same && updates_have_the_same_bits(optimizer, one.name, stream, dtype, small);
    same = same && norms_have_the_same_bits(optimizer, stream, small);
    std::printf("{\"row\": \"bits of %s and norm blocks beside the CPU's\", \"equal\": %s}\n", one.name.c_str(),
                same ? "true" : "false");
    all_same = all_same && same;
    if (parameters > 0) measure_all(optimizer, one, stream, parameters);
  }
  return all_same ? 0 : 1;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "gpu_optimizer: %s\n", failure.what());
  return 1;
}
