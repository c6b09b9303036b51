// A byte-level GPT: pre-LN blocks, causal attention, learned positions, tied head. An ordinary libtorch module.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

namespace gpt {

constexpr int64_t kVocabulary = 256;  // bytes

struct Shape {
  int64_t layers = 4, width = 192, heads = 6, context = 128;
  double dropout = 0;
  int64_t vocabulary = kVocabulary;
  int64_t head_width = 0;   // 0: width / heads
  int64_t inner_width = 0;  // of the feed-forward layers; 0: 4 * width

  int64_t attention_width() const { return head_width > 0 ? heads * head_width : width; }
  int64_t feed_forward_width() const { return inner_width > 0 ? inner_width : 4 * width; }
};

/// The layer's output by one operator. torch::nn::Linear::forward() adds the bias of inputs with three dimensions in a
/// second pass over the output.
inline torch::Tensor linear(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Shape& c)
      : heads_(c.heads),
        dropout_(c.dropout),
        ln1_(register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({c.width})))),
        qkv_(register_module("qkv", torch::nn::Linear(c.width, 3 * c.attention_width()))),
        proj_(register_module("proj", torch::nn::Linear(c.attention_width(), c.width))),
        ln2_(register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({c.width})))),
        up_(register_module("up", torch::nn::Linear(c.width, c.feed_forward_width()))),
        down_(register_module("down", torch::nn::Linear(c.feed_forward_width(), c.width))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + drop(attend(ln1_(x)));
    return x + drop(linear(down_, torch::gelu(linear(up_, ln2_(x)))));
  }

 private:
  torch::Tensor attend(const torch::Tensor& x) {
    const auto samples = x.size(0), length = x.size(1);
    const auto qkv = linear(qkv_, x).view({samples, length, 3, heads_, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, is_training() ? dropout_ : 0.0,
                                                           /*is_causal=*/true);
    return linear(proj_, mixed.transpose(1, 2).reshape({samples, length, -1}));
  }
  torch::Tensor drop(const torch::Tensor& x) { return dropout_ > 0 ? torch::dropout(x, dropout_, is_training()) : x; }

  int64_t heads_;
  double dropout_;
  torch::nn::LayerNorm ln1_;
  torch::nn::Linear qkv_, proj_;
  torch::nn::LayerNorm ln2_;
  torch::nn::Linear up_, down_;
};
TORCH_MODULE(Block);

class ModelImpl : public torch::nn::Module {
 public:
  explicit ModelImpl(const Shape& c)
      : context_(c.context),
        wte_(register_module("wte", torch::nn::Embedding(c.vocabulary, c.width))),
        wpe_(register_module("wpe", torch::nn::Embedding(c.context, c.width))) {
    if (c.head_width == 0 && c.width % c.heads != 0) {
      throw std::invalid_argument("model.width = " + std::to_string(c.width) +
                                  " is not a multiple of model.heads = " + std::to_string(c.heads));
    }
    for (int64_t i = 0; i < c.layers; ++i) {
      blocks_->push_back(Block(c));
    }
    register_module("blocks", blocks_);
    ln_ = register_module("ln", torch::nn::LayerNorm(torch::nn::LayerNormOptions({c.width})));
    initialise(c.layers);
  }

  /// Logits [samples, length, vocabulary] for bytes [samples, length] (int64), length <= context.
  torch::Tensor forward(const torch::Tensor& bytes) {
    auto x = wte_(bytes) + wpe_(torch::arange(bytes.size(1), bytes.options()));
    for (const auto& block : *blocks_) {
      const auto run = [block](const torch::Tensor& y) { return block->as<Block>()->forward(y); };
      x = around_block ? around_block(run, x) : run(x);
    }
    return torch::linear(ln_(x), wte_->weight);
  }

  /// If set, runs each block instead of calling it directly, for example to recompute it in backward.
  using Run = std::function<torch::Tensor(const torch::Tensor&)>;
  std::function<torch::Tensor(const Run& block, const torch::Tensor& x)> around_block;

  /// Mean nats per byte.
  torch::Tensor loss(const torch::Tensor& bytes, const torch::Tensor& next) {
    return torch::cross_entropy_loss(forward(bytes).flatten(0, 1).to(torch::kFloat), next.flatten());
  }

  /// `length` bytes that continue `prompt`. Uses its own generator, so the random state of training does not change.
  std::string sample(const std::string& prompt, int64_t length, uint64_t seed, double temperature = 0.8) {
    torch::NoGradGuard no_grad;
    auto generator = torch::make_generator<at::CPUGeneratorImpl>(seed);
    auto text = prompt;
    for (int64_t i = 0; i < length; ++i) {
      const auto tail = text.substr(text.size() - std::min<size_t>(text.size(), context_));
      auto bytes = torch::empty({1, static_cast<int64_t>(tail.size())}, torch::kLong);
      std::transform(tail.begin(), tail.end(), bytes.data_ptr<int64_t>(), [](unsigned char c) { return c; });
      const auto logits = forward(bytes.to(wte_->weight.device()))[0][-1].to(torch::kCPU, torch::kFloat);
      const auto odds = torch::softmax(logits / temperature, 0);
      text += static_cast<char>(torch::multinomial(odds, 1, false, generator).item<int64_t>());
    }
    return text;
  }

 private:
  void initialise(int64_t layers) {
    torch::NoGradGuard no_grad;
    for (const auto& entry : named_parameters()) {
      const auto& name = entry.key();
      if (entry.value().dim() == 2) {
        const bool into_residual = name.find("proj.") != name.npos || name.find("down.") != name.npos;
        torch::nn::init::normal_(entry.value(), 0, into_residual ? 0.02 / std::sqrt(2.0 * layers) : 0.02);
      } else if (name.find("bias") != name.npos) {
        torch::nn::init::zeros_(entry.value());
      }
    }
  }

  int64_t context_;
  torch::nn::Embedding wte_, wpe_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm ln_{nullptr};
};
TORCH_MODULE(Model);

}  // namespace gpt
