// Times training steps of a GPT on a device beside plain libtorch on the same device, in the same process.
//   gpu_step [--vocabulary N] DEVICE LAYERS WIDTH HEADS CONTEXT SAMPLES STEPS [path=value ...]
// DEVICE is a value of job.device ("cuda"); "cpu" tries the program out. Prints one line of JSON per figure. With a key
// of [offload], plain libtorch does less work, as it keeps states on the device: the figures are then those of offload.
// The row with a mark is then the time of forward and backward until all reduced gradients are in host memory, where
// the CPU updates them, divided by the larger of forward and backward of plain libtorch alone, and the copy of the
// bytes that the engine moves meanwhile: 4 per parameter, as reduced gradients are fp32. Weights return to the device
// while the CPU updates (2 bytes per parameter). The whole step, beside the larger of compute and both copies, has no
// mark, because it contains the update on the CPU.
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
#include "gpu/row.hpp"
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
}

void print_step(const char* name, double milliseconds, int64_t tokens) {
  std::printf("{\"row\": \"%s\", \"ms\": %.2f, \"tokens_per_s\": %.1f}\n", name, milliseconds,
              1e3 * static_cast<double>(tokens) / milliseconds);
}

// The model in bf16 on the device, with fp32 master weights and states there, as libtorch's fused AdamW needs them.
class Plain {
 public:
  Plain(const gpt::Shape& shape, at::Device device) : model_(shape) {
    for (auto& p : model_->parameters()) {
      const at::Tensor on_device = p.detach().to(device);
      masters_.push_back(on_device);
      // Tensor::set_data() rejects devices that libtorch does not know.
      p.unsafeGetTensorImpl()->shallow_copy_from(on_device.to(torch::kBFloat16).getIntrusivePtr());
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

 private:
  gpt::Model model_;
  std::vector<torch::Tensor> params_, masters_, means_, squares_, steps_;
};

// The time of copies of this many bytes between the device and pinned memory.
double transfer(at::Device device, int64_t bytes, bool to_host, int times) {
  constexpr int64_t kChunk = 256 << 20;
  const auto chunk = at::TensorOptions().dtype(torch::kByte);
  torch::Tensor host = at::empty({std::min(bytes, kChunk)}, chunk.pinned_memory(!device.is_cpu())),
                there = torch::zeros({std::min(bytes, kChunk)}, chunk.device(device));
  return median(device, times, [&] {
    for (int64_t left = bytes; left > 0; left -= kChunk) {
      const torch::Tensor a = host.narrow(0, 0, std::min(left, kChunk)), b = there.narrow(0, 0, std::min(left, kChunk));
      to_host ? a.copy_(b, true) : b.copy_(a, true);
    }
  });
}

struct Run {
  std::string device;
  gpt::Shape shape;
  int64_t samples;
  int steps;
  std::vector<std::string> overrides;
  int64_t tokens() const { return samples * shape.context; }
  bool offloads(const std::string& what) const {
    return std::ranges::any_of(overrides, [&](const auto& o) { return o.starts_with("offload." + what); });
  }
};

torch::Tensor batch(const Run& run, at::Device device) {
  return torch::randint(0, run.shape.vocabulary, {run.samples, run.shape.context}, torch::kLong).to(device);
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

// What offload costs beside what cannot be avoided: the engine copies the reduced gradients to host memory (in fp32;
// with the gradients on a tier, the gradients of autograd in bf16), and bf16 weights to the device after the update.
void measure_offload(const Run& run, at::Device device, int64_t parameters, double compute, double backward,
                     double update) {
  const double gradients = transfer(device, parameters * (run.offloads("gradients") ? 2 : 4), true, run.steps),
               weights = transfer(device, parameters * 2, false, run.steps);
  print("transfer of gradients to host memory", gradients);
  print("transfer of weights to the device", weights);
  zr::testing::print_ratio("\"row\": \"forward, backward and offload / the larger of both alone\"",
                           backward / std::max(compute, gradients), {1.15, true});
  std::printf(
      "{\"row\": \"the step with the update on the CPU / the larger of compute and both transfers\", \"ratio\": "
      "%.3f}\n",
      (backward + update) / std::max(compute, gradients + weights));
}

// Both models are in memory, and their steps are timed in turn, because the speed of the CPU varies.
void measure(const Run& run) {
  constexpr int kRounds = 3;
  Zeroth zeroth(run);
  const at::Device device = zeroth.device();
  std::printf("{\"row\": \"model\", \"parameters\": %ld, \"tokens\": %ld}\n", static_cast<long>(zeroth.parameters()),
              static_cast<long>(run.tokens()));
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
  print_step("zeroth: step", ours[kRounds / 2], run.tokens());
  const auto [backward, update] = zeroth.parts(bytes, next);
  print("zeroth: forward and engine.backward(), until gradients are where they are updated", backward);
  print("zeroth: engine.step(), until the weights are on the device", update);
  print_step("plain: step with fused AdamW", theirs[kRounds / 2], run.tokens());
  const double compute = median(device, run.steps, [&] {
    plain.backward(bytes, next);
    plain.clear();
  });
  print("plain: forward and backward", compute);
  if (run.offloads(""))
    measure_offload(run, device, zeroth.parameters(), compute, backward, update);
  else
    zr::testing::print_ratio("\"row\": \"plain / zeroth, median of 3 rounds\"", ratios[kRounds / 2], {0.97});
}

}  // namespace

int main(int argc, char** argv) {
  zr::testing::print_each_line_at_once();
  return zr::guarded([&] {
    std::vector<std::string> words(argv + 1, argv + argc);
    gpt::Shape shape;
    if (words.size() > 1 && words[0] == "--vocabulary") {
      shape.vocabulary = std::stoll(words[1]);
      words.erase(words.begin(), words.begin() + 2);
    }
    if (words.size() < 7)
      throw std::invalid_argument(
          "gpu_step [--vocabulary N] DEVICE LAYERS WIDTH HEADS CONTEXT SAMPLES STEPS [path=value ...]");
    shape.layers = std::stoll(words[1]);
    shape.width = std::stoll(words[2]);
    shape.heads = std::stoll(words[3]);
    shape.context = std::stoll(words[4]);
    measure({words[0], shape, std::stoll(words[5]), std::stoi(words[6]), {words.begin() + 7, words.end()}});
  });
}
