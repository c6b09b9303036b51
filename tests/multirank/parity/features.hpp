// Small models with features that are hard to shard.
#pragma once

#include <memory>
#include <string>

#include "multirank/parity/model.hpp"

namespace parity {

/// All features in one model: tied, unused, frozen and twice used parameters, one larger than a bucket, sizes that no
/// rank count divides, dropout, an embedding, the buffers of batch norm, and a layer that only even steps use (only
/// even micro-batches if `divergent`, so that ranks differ).
struct Everything : Model {
  struct Head : torch::nn::Module {
    explicit Head(const torch::Tensor& shared) { weight = register_parameter("weight", shared); }
    torch::Tensor weight;
  };
  explicit Everything(double dropout, bool by_micro_batch = false) : divergent(by_micro_batch) {
    embedding = register_module("embedding", torch::nn::Embedding(kWords, kWidth));
    twice = register_module("twice", torch::nn::Linear(kWidth, kWidth));
    large = register_module("large", torch::nn::Linear(kWidth, 577));
    narrow = register_module("narrow", torch::nn::Linear(577, kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    batch_norm = register_module("batch_norm", torch::nn::BatchNorm1d(kWidth));
    sometimes = register_module("sometimes", torch::nn::Linear(kWidth, kWidth));
    frozen = register_module("frozen", torch::nn::Linear(kWidth, kWidth));
    for (auto& p : frozen->parameters()) p.requires_grad_(false);
    unused = register_parameter("unused", torch::ones({7, 3}));
    scalar = register_parameter("scalar", torch::ones({}));
    drop = register_module("drop", torch::nn::Dropout(dropout));
    head = register_module("head", std::make_shared<Head>(embedding->weight));  // tied
  }
  torch::Tensor loss(int64_t step, int64_t m) override {
    const auto words = draw(step, m, kWords, {kSamples, kTokens}),
               targets = draw(step + 1000, m, kWords, {kSamples, kTokens});
    auto x = embedding(words).view({-1, kWidth});
    x = x + drop(torch::gelu(twice(x)));
    x = x + drop(narrow(torch::gelu(large(norm(x)))));
    x = twice(x) * scalar + frozen(x);
    if ((divergent ? m : step) % 2 == 0) x = x + sometimes(x);
    x = batch_norm(x);
    return torch::nn::functional::cross_entropy(torch::linear(x, head->weight).to(torch::kFloat), targets.view(-1));
  }
  bool divergent;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear twice{nullptr}, large{nullptr}, narrow{nullptr}, sometimes{nullptr}, frozen{nullptr};
  std::shared_ptr<Head> head;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::BatchNorm1d batch_norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::Tensor unused, scalar;
};

/// Fewer elements than a norm block: all ranks except one own no elements.
struct Tiny : Model {
  Tiny() { line = register_module("line", torch::nn::Linear(2, 1)); }
  torch::Tensor loss(int64_t step, int64_t m) override {
    const auto x = draw(step, m, 9, {kSamples, 2}).to(line->weight.scalar_type());
    return (line(x).to(torch::kFloat) - draw(step + 1000, m, 5, {kSamples, 1}).to(torch::kFloat)).square().mean();
  }
  torch::nn::Linear line{nullptr};
};

/// Recurrent weights, updated through time.
struct Recurrent : Model {
  Recurrent() {
    embedding = register_module("embedding", torch::nn::Embedding(kWords, kWidth));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kWidth, 29).batch_first(true)));
    head = register_module("head", torch::nn::Linear(29, kWords));
  }
  torch::Tensor loss(int64_t step, int64_t m) override {
    const auto words = draw(step, m, kWords, {kSamples, kTokens});
    const auto x = std::get<0>(lstm(embedding(words)));
    return torch::nn::functional::cross_entropy(head(x).to(torch::kFloat).view({-1, kWords}),
                                                draw(step + 1000, m, kWords, {kSamples * kTokens}));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};

/// Enough parameters for the memory formulas: the padding to norm blocks, the gradients in a bucket and the weights
/// gathered ahead are a small part of them.
struct Ample : Model {
  static constexpr int64_t kSide = 448, kLayers = 40;
  Ample() {
    for (int64_t i = 0; i < kLayers; ++i)
      lines.push_back(register_module("line" + std::to_string(i), torch::nn::Linear(kSide, kSide)));
  }
  torch::Tensor loss(int64_t step, int64_t m) override {
    auto x = draw(step, m, 9, {1, kSide}).to(lines[0]->weight.scalar_type());
    for (auto& line : lines) x = torch::tanh(line(x));
    return x.to(torch::kFloat).square().mean();
  }
  std::vector<torch::nn::Linear> lines;
};

/// Many layers in the order of their use, so that backward fills the buckets from the last layer; the first layer fits
/// into the bucket that is reduced last.
struct Wide : Model {
  Wide() {
    lines.push_back(register_module("in", torch::nn::Linear(128, 16)));
    lines.push_back(register_module("out", torch::nn::Linear(16, 128)));
    for (int i = 0; i < 5; ++i)
      lines.push_back(register_module("line" + std::to_string(i), torch::nn::Linear(128, 128)));
  }
  torch::Tensor loss(int64_t step, int64_t m) override {
    auto x = draw(step, m, 9, {kSamples, 128}).to(lines[0]->weight.scalar_type());
    for (auto& line : lines) x = torch::tanh(line(x));
    return x.to(torch::kFloat).square().mean();
  }
  std::vector<torch::nn::Linear> lines;
};

// 2.1 million parameters, which optimizers exchange in several parts.
struct Millions : Model {
  Millions() : line(register_module("line", torch::nn::Linear(1600, 1300))) {}
  torch::Tensor loss(int64_t step, int64_t m) override {
    const auto x = draw(step, m, 10, {kSamples, 1600}).to(line->weight.scalar_type());
    return line(x).to(torch::kFloat).square().mean();
  }
  torch::nn::Linear line;
};

}  // namespace parity
