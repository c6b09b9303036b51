// One tiny model per feature that is hard to shard; each is a row of the parity matrix.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "multirank/parity/features.hpp"

namespace parity {

/// How backward recomputes a block. The reference calls the block directly; the trainer sets zr::checkpoint() here.
using Block = std::function<torch::Tensor(const torch::Tensor&)>;
inline std::function<torch::Tensor(const Block&, const torch::Tensor&)> recomputed =
    [](const Block& block, const torch::Tensor& x) { return block(x); };

/// Maps `width` numbers to `words` classes; the layers in between have the feature.
struct OneFeature : Model {
  explicit OneFeature(int64_t input = kWidth, int64_t classes = kWords) : width(input), words(classes) {}
  virtual torch::Tensor logits(const torch::Tensor& x) = 0;
  /// The input of micro-batch m: small numbers that fp16 represents too.
  virtual torch::Tensor input(int64_t step, int64_t m) {
    return (draw(step, m, 9, {kSamples, width}).to(torch::kFloat) / 8 - 0.5).to(parameters()[0].scalar_type());
  }
  torch::Tensor loss(int64_t step, int64_t m) override {
    return torch::nn::functional::cross_entropy(logits(input(step, m)).to(torch::kFloat),
                                                draw(step + 1000, m, words, {kSamples}));
  }
  torch::nn::Linear line(const char* name, int64_t in, int64_t out) {
    return register_module(name, torch::nn::Linear(in, out));
  }
  int64_t width, words;
};

/// Words in, words out.
struct OverWords : OneFeature {
  torch::Tensor input(int64_t step, int64_t m) override { return draw(step, m, kWords, {kSamples}); }
};

struct Tied : OverWords {
  torch::Tensor logits(const torch::Tensor& x) override {
    return torch::linear(torch::tanh(middle(embedding(x))), head->weight);
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(kWords, kWidth));
  torch::nn::Linear middle = line("middle", kWidth, kWidth);
  std::shared_ptr<Everything::Head> head =
      register_module("head", std::make_shared<Everything::Head>(embedding->weight));
};

struct Unused : OneFeature {
  torch::Tensor logits(const torch::Tensor& x) override { return used(x); }
  torch::nn::Linear before = line("before", 40, 40);
  torch::nn::Linear used = line("used", kWidth, kWords);
  torch::Tensor after = register_parameter("after", torch::ones({7, 3}));
};

struct Frozen : OneFeature {
  Frozen() {
    for (auto& p : middle->parameters()) p.requires_grad_(false);
  }
  torch::Tensor logits(const torch::Tensor& x) override { return out(torch::tanh(middle(in(x)))); }
  torch::nn::Linear in = line("in", kWidth, 40), middle = line("middle", 40, 40), out = line("out", 40, kWords);
};

struct UsedTwice : OneFeature {
  torch::Tensor logits(const torch::Tensor& x) override { return out(twice(torch::tanh(twice(x)))); }
  torch::nn::Linear twice = line("twice", kWidth, kWidth), out = line("out", kWidth, kWords);
};

/// Prime numbers of elements, which neither rank counts nor norm blocks divide.
struct Indivisible : OneFeature {
  Indivisible() : OneFeature(3079) {}
  torch::Tensor logits(const torch::Tensor& x) override {
    return (x * scale).narrow(1, 0, kWords * 50).view({kSamples, kWords, 50}).sum(2) + shift.narrow(0, 0, kWords);
  }
  torch::Tensor scale = register_parameter("scale", torch::randn({3079}) / 16);
  torch::Tensor shift = register_parameter("shift", torch::randn({1031}) / 16);
};

/// A weight of 75 KiB if elements have two bytes: more than a bucket of 64 KiB.
struct Large : OneFeature {
  Large() : OneFeature(64, 13) {}
  torch::Tensor logits(const torch::Tensor& x) override { return out(torch::tanh(large(x))); }
  torch::nn::Linear large = line("large", 64, 601), out = line("out", 601, 13);
};

/// Fewer elements than a norm block: all ranks except one own no elements.
struct EmptyShard : OneFeature {
  EmptyShard() : OneFeature(2, 3) {}
  torch::Tensor logits(const torch::Tensor& x) override { return only(x); }
  torch::nn::Linear only = line("only", 2, 3);
};

struct WithDropout : OneFeature {
  torch::Tensor logits(const torch::Tensor& x) override { return out(drop(torch::gelu(in(drop(x))))); }
  torch::nn::Linear in = line("in", kWidth, 70), out = line("out", 70, kWords);
  torch::nn::Dropout drop = register_module("drop", torch::nn::Dropout(0.25));
};

/// Two nested blocks that backward recomputes, with dropout.
struct Recomputed : WithDropout {
  torch::Tensor logits(const torch::Tensor& x) override {
    const Block inner = [this](const torch::Tensor& y) { return drop(torch::tanh(middle(y))); };
    const Block outer = [this, inner](const torch::Tensor& y) { return recomputed(inner, drop(torch::gelu(in(y)))); };
    return out(recomputed(outer, x));
  }
  torch::nn::Linear middle = line("middle", 70, 70);
};

/// Embeddings with dense and with sparse gradients; words occur twice in a micro-batch.
struct Embeddings : OverWords {
  torch::Tensor input(int64_t step, int64_t m) override { return draw(step, m, 7, {kSamples, kTokens}); }
  torch::Tensor logits(const torch::Tensor& x) override { return out(torch::tanh(dense(x).sum(1) + sparse(x).sum(1))); }
  torch::nn::Embedding dense = register_module("dense", torch::nn::Embedding(kWords, kWidth));
  torch::nn::Embedding sparse =
      register_module("sparse", torch::nn::Embedding(torch::nn::EmbeddingOptions(kWords, kWidth).sparse(true)));
  torch::nn::Linear out = line("out", kWidth, kWords);
};

/// A TorchScript model.
struct Scripted : OneFeature {
  Scripted() {
    const auto add = [this](const std::string& name, int64_t in, int64_t out) {
      const torch::nn::Linear line(in, out);
      for (const auto& item : line->named_parameters()) {
        script_.register_parameter(name + "_" + item.key(), item.value(), false);
        register_parameter(name + "_" + item.key(), item.value());
      }
    };
    add("first", kWidth, 40);
    add("second", 40, 40);
    add("last", 40, kWords);
    script_.define(R"(
      def forward(self, x):
          x = torch.tanh(torch.linear(x, self.first_weight, self.first_bias))
          for i in range(2):
              x = x + torch.tanh(torch.linear(x, self.second_weight, self.second_bias)) * 0.5
          return torch.linear(x, self.last_weight, self.last_bias)
    )");
  }
  torch::Tensor logits(const torch::Tensor& x) override { return script_.forward({x}).toTensor(); }
  torch::jit::Module* script() override { return &script_; }
  torch::jit::Module script_{"Scripted"};
};

template <class M>
std::shared_ptr<Model> made() {
  return std::make_shared<M>();
}
/// The models by their names in the matrix.
inline const std::map<std::string, std::shared_ptr<Model> (*)()> kOneFeature{
    {"tied", made<Tied>},
    {"unused", made<Unused>},
    {"frozen", made<Frozen>},
    {"used_twice", made<UsedTwice>},
    {"indivisible", made<Indivisible>},
    {"large", made<Large>},
    {"empty_shard", made<EmptyShard>},
    {"with_dropout", made<WithDropout>},
    {"recomputed", made<Recomputed>},
    {"embeddings", made<Embeddings>},
    {"lstm", made<Recurrent>},
    {"torchscript", made<Scripted>},
};

}  // namespace parity
