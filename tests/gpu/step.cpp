// Times training steps of a GPT on a device beside plain libtorch on the same device, in the same process.
//   gpu_step DEVICE LAYERS WIDTH HEADS CONTEXT SAMPLES STEPS [path=value ...]
// DEVICE is a value of job.device ("cuda"); "cpu" tries the program out. Prints one line of JSON per figure.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gpt/model.hpp"
#include "zr/engine.hpp"

namespace {

using Clock = std::chrono::steady_clock;

void wait_for(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// The median time of `times` calls in milliseconds, after two calls that are not counted. Waits for the device.
double median(at::Device device, int times, const std::function<void()>& call) {
  std::vector<double> all;
  for (int i = -2; i < times; ++i) {
    wait_for(device);
    const auto start = Clock::now();
    call();
    wait_for(device);
    if (i >= 0) all.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

void print(const char* name, double milliseconds) {
  std::printf("{\"row\": \"%s\", \"ms\": %.2f}\n", name, milliseconds);
  std::fflush(stdout);
}

// The model in bf16 on the device, with fp32 master weights and states there, as libtorch's fused AdamW needs them.
class Plain {
 public:
  Plain(const gpt::Shape& shape, at::Device device) : model_(shape) {
    for (auto& p : model_->parameters()) {
      const at::Tensor on_device = p.detach().to(device);
      masters_.push_back(on_device);
      p.set_data(on_device.to(torch::kBFloat16));
      params_.push_back(p);
      means_.push_back(torch::zeros_like(on_device));
      squares_.push_back(torch::zeros_like(on_device));
      steps_.push_back(torch::zeros({}, on_device.options()));
    }
  }
  void backward(const torch::Tensor& bytes, const torch::Tensor& next) { model_->loss(bytes, next).backward(); }
  void clear() {
    for (auto& p : params_) p.mutable_grad() = torch::Tensor();
  }
  void update() {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> grads;
    for (auto& p : params_) grads.push_back(p.grad().to(torch::kFloat));
    for (auto& s : steps_) s += 1;
    at::_fused_adamw_(masters_, grads, means_, squares_, {}, steps_, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
    for (std::size_t i = 0; i < params_.size(); ++i) params_[i].copy_(masters_[i]);
  }
  const std::vector<torch::Tensor>& params() const { return params_; }

 private:
  gpt::Model model_;
  std::vector<torch::Tensor> params_, masters_, means_, squares_, steps_;
};

// Copies of all gradients to pinned memory and of all weights from there, each on the current stream.
double transfer(const std::vector<torch::Tensor>& params, at::Device device, int times) {
  std::vector<torch::Tensor> on_host;
  for (const auto& p : params)
    on_host.push_back(at::empty(p.sizes(), at::TensorOptions().dtype(p.scalar_type()).pinned_memory(!device.is_cpu())));
  const torch::NoGradGuard no_grad;
  return median(device, times, [&] {
    for (std::size_t i = 0; i < params.size(); ++i) on_host[i].copy_(params[i], true);
    for (std::size_t i = 0; i < params.size(); ++i) params[i].detach().copy_(on_host[i], true);
  });
}

struct Run {
  std::string device;
  gpt::Shape shape;
  int64_t samples;
  int steps;
  std::vector<std::string> overrides;
};

torch::Tensor batch(const Run& run, at::Device device) {
  return torch::randint(0, 256, {run.samples, run.shape.context}, torch::kLong).to(device);
}

// A training job of one rank.
class Zeroth {
 public:
  explicit Zeroth(const Run& run)
      : run_(run), program_(configuration(run), run.overrides), model_(run.shape), engine_(program_, *model_) {}
  at::Device device() const { return engine_.device(); }
  int64_t parameters() const {
    int64_t elements = 0;
    for (const auto& p : model_->parameters()) elements += p.numel();
    return elements;
  }
  // The median time of a step.
  double step(const torch::Tensor& bytes, const torch::Tensor& next) {
    return median(device(), run_.steps, [&] {
      engine_.backward(model_->loss(bytes, next));
      engine_.step();
    });
  }
  // The median times of its two parts, each until the device is idle: copies of gradients belong to the first one.
  std::pair<double, double> parts(const torch::Tensor& bytes, const torch::Tensor& next) {
    std::vector<double> backward;
    const double whole = median(device(), run_.steps, [&] {
      const auto start = Clock::now();
      engine_.backward(model_->loss(bytes, next));
      wait_for(device());
      backward.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      engine_.step();
    });
    backward.erase(backward.begin(), backward.begin() + 2);  // as median()
    std::sort(backward.begin(), backward.end());
    const double first = backward[backward.size() / 2];
    return {first, whole - first};
  }

 private:
  static zr::Configuration configuration(const Run& run) {
    zr::Configuration config;
    config.set("job.device", run.device).set("job.name", "gpu_step").set("job.runs", "/tmp/gpu_step_runs");
    config.set("train.dtype", "bf16").set("train.steps", 1000000).set("train.micro_batch", run.samples);
    config.set("strategy", "zero2").set("optimizer", "adamw");
    return config;
  }
  const Run& run_;
  zr::Program program_;
  gpt::Model model_;
  zr::Engine engine_;
};

// Both models are in memory, and their steps are timed in turn, because the speed of the CPU varies.
void measure(const Run& run) {
  constexpr int kRounds = 3;
  Zeroth zeroth(run);
  const at::Device device = zeroth.device();
  std::printf("{\"row\": \"model\", \"parameters\": %ld, \"tokens\": %ld}\n", static_cast<long>(zeroth.parameters()),
              static_cast<long>(run.samples * run.shape.context));
  Plain plain(run.shape, device);
  const torch::Tensor bytes = batch(run, device), next = batch(run, device);
  std::vector<double> ours, theirs, ratios;
  for (int round = 0; round < kRounds; ++round) {
    ours.push_back(zeroth.step(bytes, next));
    theirs.push_back(median(device, run.steps, [&] {
      plain.backward(bytes, next);
      plain.update();
      plain.clear();
    }));
    ratios.push_back(theirs.back() / ours.back());
  }
  for (auto* list : {&ours, &theirs, &ratios}) std::sort(list->begin(), list->end());
  print("zeroth: step", ours[kRounds / 2]);
  const auto [backward, update] = zeroth.parts(bytes, next);
  print("zeroth: forward and engine.backward(), until gradients are where they are updated", backward);
  print("zeroth: engine.step(), until the weights are on the device", update);
  print("plain: step with fused AdamW", theirs[kRounds / 2]);
  std::printf("{\"row\": \"plain / zeroth, median of %d rounds\", \"ratio\": %.3f, \"mark\": 0.97}\n", kRounds,
              ratios[kRounds / 2]);
  const double alone = median(device, run.steps, [&] {
    plain.backward(bytes, next);
    plain.clear();
  });
  const double copies = transfer(plain.params(), device, run.steps);
  print("plain: forward and backward", alone);
  print("transfer of gradients and weights", copies);
  std::printf(
      "{\"row\": \"forward, backward and offload / the larger of plain and transfer\", \"ratio\": %.3f, \"mark\": "
      "1.15}\n",
      backward / std::max(alone, copies));
}

}  // namespace

int main(int argc, char** argv) {
  return zr::guarded([&] {
    if (argc < 8)
      throw std::invalid_argument("gpu_step DEVICE LAYERS WIDTH HEADS CONTEXT SAMPLES STEPS [path=value ...]");
    const Run run{argv[1],
                  {std::stoll(argv[2]), std::stoll(argv[3]), std::stoll(argv[4]), std::stoll(argv[5]), 0},
                  std::stoll(argv[6]),
                  std::stoi(argv[7]),
                  {argv + 8, argv + argc}};
    measure(run);
  });
}
