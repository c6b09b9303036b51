#include "multirank/parity/reference.hpp"

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include <cmath>
#include <set>

#include "multirank/parity/models.hpp"

namespace parity {

namespace {

struct State {
  std::string name;
  torch::Tensor tensor;  // weight, in the training dtype
  std::vector<float> master, sum, m, v;
  std::vector<std::vector<float>> held;  // `last`: per rank, the sum over the micro-steps
  int64_t steps = 0;
  bool touched = false;
};

// The generator is reseeded from (seed, step, m), mixed as in SplitMix64 (docs/numerics.md, section 1).
uint64_t mixed(uint64_t seed, uint64_t step, uint64_t m) {
  uint64_t x = seed;
  for (const uint64_t y : {step, m}) {
    x += 0x9e3779b97f4a7c15u + y;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return x;
}

// Norm blocks of 1024 elements with 16 lanes each, added in logical order.
double sum_of_squares(const std::vector<State>& states) {
  double total = 0;
  for (const State& s : states)
    for (std::size_t block = 0; block < s.sum.size(); block += 1024) {
      double lanes[16] = {};
      for (std::size_t i = block; i < std::min(block + 1024, s.sum.size()); ++i) {
        const double x = s.sum[i];
        lanes[(i - block) % 16] = lanes[(i - block) % 16] + x * x;
      }
      double sum = 0;
      for (const double lane : lanes) sum = sum + lane;
      total = total + sum;
    }
  return total;
}

// docs/numerics.md, section 9: adamw with its defaults.
void adamw(State& s, float mul, double lr) {
  const double step = static_cast<double>(s.steps);
  const auto decay = static_cast<float>(1 - lr * 0.01), beta1 = static_cast<float>(0.9),
             gain1 = static_cast<float>(1 - 0.9);
  const auto beta2 = static_cast<float>(0.999), gain2 = static_cast<float>(1 - 0.999);
  const double correction = std::sqrt(1 - std::pow(0.999, step));
  const auto rate = static_cast<float>(lr * correction / (1 - std::pow(0.9, step))),
             eps = static_cast<float>(1e-8 * correction);
  for (std::size_t i = 0; i < s.master.size(); ++i) {
    const float g = s.sum[i] * mul;
    const float kept1 = s.m[i] * beta1, new1 = g * gain1;
    s.m[i] = kept1 + new1;
    const float kept2 = s.v[i] * beta2, part2 = g * gain2, new2 = part2 * g;
    s.v[i] = kept2 + new2;
    const float root = std::sqrt(s.v[i]), kept = s.master[i] * decay, step_size = s.m[i] * rate;
    s.master[i] = kept - step_size / (root + eps);
  }
}

// docs/numerics.md, section 9: sgd with momentum 0.9, Nesterov, weight decay 0.1.
void sgd(State& s, float mul, double lr) {
  const float rate = static_cast<float>(lr), mu = 0.9f, decay = 0.1f;
  for (std::size_t i = 0; i < s.master.size(); ++i) {
    float g = s.sum[i] * mul;
    const float pulled = s.master[i] * decay;
    g = g + pulled;
    const float kept = s.m[i] * mu;
    s.m[i] = s.steps == 1 ? g : kept + g;
    const float ahead = s.m[i] * mu;
    g = g + ahead;
    const float move = g * rate;
    s.master[i] = s.master[i] - move;
  }
}

// The loss scale, updated as in DeepSpeed.
struct Scaler {
  double scale;
  int window, hysteresis, left, since = 0;
  void step(bool overflow) {
    if (overflow) {
      since = 0;
      if (left == 1) scale = std::max(scale / 2, 1.0);
      left = std::max(left - 1, 1);
      return;
    }
    if (since > 0 && since % window == 0) {
      scale *= 2;
      left = hysteresis;
    }
    ++since;
  }
};

at::ScalarType type_named(const std::string& name) {
  return name == "bf16" ? torch::kBFloat16 : name == "fp16" ? torch::kHalf : torch::kFloat;
}

std::vector<float> floats(const torch::Tensor& tensor) {
  const torch::Tensor flat = tensor.detach().to(torch::kCPU, torch::kFloat).contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

void add(std::vector<float>& sum, const std::vector<float>& values) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + values[i];
}

}  // namespace

Outcome reference(const Recipe& recipe) {
  at::set_num_threads(recipe.threads);
  torch::jit::getProfilingMode() = false;  // with profiling, TorchScript computes differently after some runs
  auto model = make(recipe.model, recipe.seed);
  std::vector<State> states;
  Outcome outcome;
  std::set<const void*> seen;
  std::vector<std::pair<std::string, torch::Tensor>> frozen;
  std::vector<std::vector<float>> masters;
  for (const auto& item : model->named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;  // tied
    if (!item.value().requires_grad()) {
      frozen.emplace_back(item.key(), item.value());
      continue;
    }
    State s{item.key(), item.value(), floats(item.value()), {}, {}, {}, {}};
    s.sum.resize(s.master.size());
    s.m.resize(s.master.size());
    s.v.resize(s.master.size());
    states.push_back(std::move(s));
  }
  const at::ScalarType dtype = type_named(recipe.dtype);
  if (!device.is_cpu()) {
    move(*model, dtype);
  } else if (dtype != torch::kFloat) {
    for (auto& item : model->named_parameters())
      if (!recipe.keeps_fp32(item.key())) item.value().set_data(item.value().to(dtype));
    for (auto& item : model->named_buffers())
      if (item.value().is_floating_point() && recipe.rounds_buffers) item.value().set_data(item.value().to(dtype));
  }
  Scaler scaler{recipe.dtype == "fp16" ? std::exp2(recipe.scale_power) : 1.0, recipe.window, recipe.hysteresis,
                recipe.hysteresis};
  const auto rounded = [](const torch::Tensor& tensor, const std::string& to) {
    return floats(to.empty() ? tensor : tensor.to(type_named(to)));
  };
  // Rounds to the dtype of the reduced gradients: after every N micro-batches; if `last`, after each and at the end.
  const auto round = [&](std::vector<float>& sum) {
    if (recipe.gradient_dtype != "fp32")
      sum = rounded(torch::from_blob(sum.data(), {static_cast<int64_t>(sum.size())}), recipe.gradient_dtype);
  };
  for (int64_t step = 0; step < recipe.steps; ++step) {
    double loss_sum = 0, weight_sum = 0;
    for (State& s : states) {
      std::fill(s.sum.begin(), s.sum.end(), 0.0f);
      s.touched = false;
      s.held.assign(recipe.last ? static_cast<std::size_t>(recipe.ranks) : 0, std::vector<float>(s.sum.size()));
    }
    for (int i = 0; i < recipe.micro_batches; ++i) {
      const int m = recipe.backwards ? recipe.micro_batches - 1 - i : i;
      seed(mixed(recipe.seed, static_cast<uint64_t>(step), static_cast<uint64_t>(m)));
      const double weight = recipe.weighted ? m + 1 : 1;
      const auto loss = model->loss(step, m);
      const double factor = weight * scaler.scale;
      (factor == 1 ? loss : loss * factor).backward();
      loss_sum = loss_sum + loss.item<double>() * weight;
      weight_sum = weight_sum + weight;
      for (State& s : states) {
        std::vector<float>& sum = recipe.last ? s.held[static_cast<std::size_t>(m % recipe.ranks)] : s.sum;
        torch::Tensor& gradient = s.tensor.mutable_grad();
        if (!gradient.defined()) {  // an undefined gradient counts as zeros
          for (float& g : sum) g = g + 0.0f;
          continue;
        }
        s.touched = true;
        add(sum, rounded(gradient.is_sparse() ? gradient.to_dense() : gradient, recipe.reduce_dtype));
        if (recipe.last) round(sum);
        gradient = torch::Tensor();
      }
      if (recipe.last || (i + 1) % recipe.ranks != 0) continue;
      for (State& s : states) round(s.sum);
    }
    for (State& s : states) {
      for (const std::vector<float>& held : s.held) add(s.sum, held);
      if (recipe.last) round(s.sum);
    }
    bool overflow = false;
    for (const State& s : states)
      for (const float g : s.sum) overflow |= !std::isfinite(g);
    const double divisor = weight_sum * scaler.scale;
    const double norm = std::sqrt(sum_of_squares(states)) / divisor;
    const double scale = recipe.clip > 0 ? std::min(1.0, recipe.clip / (norm + 1e-6)) : 1.0;
    const auto mul = static_cast<float>(scale / divisor);
    outcome.push_back({loss_sum / weight_sum, norm, scaler.scale, {}});
    if (recipe.dtype == "fp16") scaler.step(overflow);
    const torch::NoGradGuard no_grad;
    for (State& s : states) {
      if (!s.touched || overflow) continue;
      ++s.steps;
      recipe.optimizer == "adamw" ? adamw(s, mul, recipe.lr) : sgd(s, mul, recipe.lr);
      s.tensor.copy_(torch::from_blob(s.master.data(), s.tensor.sizes(), torch::kFloat));
    }
    if (!recipe.trace && step + 1 < recipe.steps) continue;
    Weights& weights = outcome.back().weights;
    for (const State& s : states) weights["model's " + s.name] = floats(s.tensor);
    for (const State& s : states) weights[s.name] = s.master;
    for (const auto& [name, tensor] : frozen) weights[name] = weights["model's " + name] = floats(tensor);
  }
  return outcome;
}

}  // namespace parity
