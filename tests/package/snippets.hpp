// What the fragments of docs/training-from-cpp.md use without declaring it (package.cmake).
#pragma once

#include <torch/data.h>
#include <torch/types.h>

#include <cmath>
#include <iostream>
#include <utility>

#include "zr/engine.hpp"
#include "zr/sampler.hpp"

inline int64_t correct, total;            // counts of one rank
inline torch::Tensor predictions, noise;  // any tensors
inline torch::data::datasets::TensorDataset dataset{torch::Tensor()};
inline std::size_t size;  // samples of the dataset

template <class Batch>
torch::Tensor loss_of(const Batch& batch);
