// The base class of the models of the parity tests, and their data, a function of step and micro-batch only.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn.h>

#include <cstdint>

namespace parity {

inline constexpr int64_t kSamples = 3;  // per micro-batch
inline constexpr int64_t kTokens = 5;   // per sample
inline constexpr int64_t kWords = 61;   // indivisible by 2, 3, 4
inline constexpr int64_t kWidth = 36;

/// A model whose `loss(step, m)` is that of micro-batch m of a step.
struct Model : torch::nn::Module {
  virtual torch::Tensor loss(int64_t step, int64_t m) = 0;
  virtual torch::jit::Module* script() { return nullptr; }  // if set, trained instead; it has the same parameters
};

/// The device that the models compute on; see device.hpp.
inline at::Device device = at::kCPU;

inline torch::Tensor draw(int64_t step, int64_t m, int64_t high, torch::IntArrayRef shape) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000003 * step + 7919 * m + 17));
  return torch::randint(0, high, shape, generator, torch::kLong).to(device);
}

}  // namespace parity
