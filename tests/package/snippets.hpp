// What the C++ fragments of README.md and docs/ use without declaring it, and the headers of their programs
// (package.cmake).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/data.h>
#include <torch/nn.h>
#include <torch/serialize.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <utility>

#include "zr/engine.hpp"
#include "zr/parameters.hpp"
#include "zr/recompute.hpp"
#include "zr/sampler.hpp"
#include "zr/swap.hpp"
#include "zr/weights.hpp"

inline int64_t correct, total;               // counts of one rank
inline torch::Tensor predictions, noise, x;  // any tensors
inline torch::data::datasets::TensorDataset dataset{torch::Tensor()};
inline std::size_t size;  // samples of the dataset
inline int config;        // of a model
inline torch::nn::Linear model{nullptr};
struct Layer {
  std::string name;
  torch::Tensor weight;
};
inline std::vector<Layer> layers;
using Gpt = torch::nn::ReLU;

template <class Batch>
torch::Tensor loss_of(const Batch& batch);
torch::Tensor batch(int64_t step, int64_t micro_batch, int64_t samples);
