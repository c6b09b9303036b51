#include "multirank/model/operators/cases.hpp"

namespace operators {

namespace nn = torch::nn;

namespace {
// One module and its forward.
template <class Holder, class Options, class F>
Case layer(std::string name, Options options, std::vector<int64_t> input, F forward) {
  return {std::move(name), [options] { return Holder(options).ptr(); },
          [forward](nn::Module& module, const Tensor& x) -> Outputs {
            return {forward(*module.as<typename Holder::ContainedType>(), x)};
          },
          std::move(input)};
}
const auto plainly = [](auto& module, const Tensor& x) { return module.forward(x); };
const auto first = [](auto& module, const Tensor& x) { return std::get<0>(module.forward(x)); };
Tensor words(const Tensor& x) { return torch::arange(10, x.device()) % 7; }
const auto of_words = [](auto& module, const Tensor& x) { return module.forward(words(x)); };
const auto of_bags = [](auto& module, const Tensor& x) { return module.forward(words(x).view({2, 5})); };
}  // namespace

const std::vector<Case>& layers() {
  static const std::vector<Case> cases{
      layer<nn::Linear>("linear", nn::LinearOptions(16, 32), {8, 16}, plainly),
      layer<nn::Linear>("linear of three dimensions", nn::LinearOptions(16, 32), {2, 8, 16}, plainly),
      layer<nn::Linear>("linear without bias", nn::LinearOptions(16, 32).bias(false), {2, 8, 16}, plainly),
      layer<nn::Linear>("linear larger than a norm block", nn::LinearOptions(96, 70), {4, 96}, plainly),
      layer<nn::Conv1d>("conv1d", nn::Conv1dOptions(4, 8, 3), {2, 4, 12}, plainly),
      layer<nn::Conv2d>("conv2d", nn::Conv2dOptions(4, 8, 3).padding(1), {2, 4, 12, 12}, plainly),
      layer<nn::Conv2d>("conv2d, depthwise", nn::Conv2dOptions(8, 8, 3).groups(8), {2, 8, 12, 12}, plainly),
      layer<nn::Conv2d>("conv2d, dilated", nn::Conv2dOptions(4, 8, 3).dilation(2), {2, 4, 12, 12}, plainly),
      layer<nn::ConvTranspose2d>("conv_transpose2d", nn::ConvTranspose2dOptions(4, 8, 3), {2, 4, 12, 12}, plainly),
      layer<nn::Embedding>("embedding", nn::EmbeddingOptions(20, 16), {1}, of_words),
      layer<nn::Embedding>("embedding with sparse gradients", nn::EmbeddingOptions(20, 16).sparse(true), {1}, of_words),
      layer<nn::Embedding>("embedding with a padding word", nn::EmbeddingOptions(20, 16).padding_idx(3), {1}, of_words),
      layer<nn::Embedding>("embedding renormalised in place", nn::EmbeddingOptions(20, 16).max_norm(1.5), {1},
                           of_words),
      layer<nn::EmbeddingBag>("embedding bag, sum", nn::EmbeddingBagOptions(20, 16).mode(torch::kSum), {1}, of_bags),
      layer<nn::EmbeddingBag>("embedding bag, mean", nn::EmbeddingBagOptions(20, 16).mode(torch::kMean), {1}, of_bags),
      layer<nn::LayerNorm>("layer norm", nn::LayerNormOptions({16}), {8, 16}, plainly),
      layer<nn::GroupNorm>("group norm", nn::GroupNormOptions(2, 8), {2, 8, 5, 5}, plainly),
      layer<nn::BatchNorm2d>("batch norm", nn::BatchNormOptions(8), {2, 8, 5, 5}, plainly),
      layer<nn::InstanceNorm2d>("instance norm", nn::InstanceNorm2dOptions(8).affine(true), {2, 8, 5, 5}, plainly),
      layer<nn::PReLU>("prelu", nn::PReLUOptions().num_parameters(16), {8, 16}, plainly),
      layer<nn::LSTM>("lstm of two layers", nn::LSTMOptions(16, 16).num_layers(2), {5, 2, 16}, first),
      layer<nn::LSTM>("lstm with projection", nn::LSTMOptions(16, 16).proj_size(4), {5, 2, 16}, first),
      layer<nn::GRU>("gru of both directions", nn::GRUOptions(16, 16).bidirectional(true), {5, 2, 16}, first),
      layer<nn::RNN>("rnn", nn::RNNOptions(16, 16), {5, 2, 16}, first),
      layer<nn::LSTMCell>("lstm cell", nn::LSTMCellOptions(16, 16), {2, 16}, first),
      layer<nn::MultiheadAttention>("multi-head attention", nn::MultiheadAttentionOptions(16, 4), {5, 2, 16},
                                    [](auto& m, const Tensor& x) { return std::get<0>(m.forward(x, x, x)); }),
      layer<nn::TransformerEncoderLayer>("transformer encoder layer with dropout",
                                         nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.1),
                                         {5, 2, 16}, plainly),
      layer<nn::Bilinear>("bilinear", nn::BilinearOptions(16, 16, 4), {8, 16},
                          [](auto& m, const Tensor& x) { return m.forward(x, x * 2); }),
  };
  return cases;
}

}  // namespace operators
