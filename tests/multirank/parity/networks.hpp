// The usual architectures, small: a GPT and a convolutional network. The recurrent one is in features.hpp.
#pragma once

#include "gpt/model.hpp"
#include "multirank/parity/one_feature.hpp"

namespace parity {

/// The model of examples/gpt: attention, layer norm, embeddings of words and positions, a tied head.
struct Gpt : Model {
  static constexpr int64_t kLength = 16;
  torch::Tensor loss(int64_t step, int64_t m) override {
    const auto bytes = draw(step, m, gpt::kVocabulary, {kSamples, kLength + 1});
    return net->loss(bytes.narrow(1, 0, kLength), bytes.narrow(1, 1, kLength));
  }
  gpt::Model net =
      register_module("net", gpt::Model(gpt::Shape{.layers = 2, .width = 24, .heads = 2, .context = kLength}));
};

/// Convolutions, one of them depthwise, with batch norm and pooling.
struct Convolutional : OneFeature {
  static constexpr int64_t kSide = 12;
  Convolutional() : OneFeature(3 * kSide * kSide) {}
  torch::Tensor logits(const torch::Tensor& x) override {
    auto y = torch::max_pool2d(torch::relu(norm(first(x.view({kSamples, 3, kSide, kSide})))), 2);
    y = torch::avg_pool2d(torch::relu(second(y)), 2);
    return out(torch::adaptive_avg_pool2d(y, {1, 1}).flatten(1));
  }
  torch::nn::Conv2d first = register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(8));
  torch::nn::Conv2d second =
      register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 3).padding(1).groups(8)));
  torch::nn::Linear out = line("out", 16, kWords);
};

}  // namespace parity
