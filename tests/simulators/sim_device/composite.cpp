// Operators that libtorch composes differently by device: composed as for the CPU, so that the bits are the same.
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <map>

#include "sim.hpp"

namespace zr::test::sim {
namespace {

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true) || input.numel() == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  at::Tensor output = input.mul(mask);
  return {output.mul_(p == 1 ? 0. : 1. / (1. - p)), mask};
}

// The choice that the CPU backend makes for tensors of the same layout.
int64_t sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                   bool gqa) {
  const auto on_cpu = [](const at::Tensor& t) {
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)).requires_grad_(t.requires_grad());
  };
  std::optional<at::Tensor> cpu_mask;
  if (mask.has_value() && mask->defined()) cpu_mask = on_cpu(*mask);
  return at::_fused_sdp_choice(on_cpu(query), on_cpu(key), on_cpu(value), cpu_mask, dropout, causal, scale, gqa);
}

// The new h and c. `gates` is the sum of the products of the input and of the old h.
std::pair<at::Tensor, at::Tensor> lstm_step(const at::Tensor& gates, const at::Tensor& c) {
  const std::vector<at::Tensor> each = gates.unsafe_chunk(4, 1);
  at::Tensor in = each[0].sigmoid_(), forget = each[1].sigmoid_(), cell = each[2].tanh_(), out = each[3].sigmoid_();
  const at::Tensor next = (forget * c).add_(in * cell);
  return {out * next.tanh(), next};
}

std::tuple<at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, at::TensorList hx, const at::Tensor& w_ih,
                                             const at::Tensor& w_hh, const std::optional<at::Tensor>& b_ih,
                                             const std::optional<at::Tensor>& b_hh) {
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  const auto [h, c] = lstm_step(at::linear(hx[0], w_hh, b_hh).add_(at::linear(input, w_ih, b_ih)), hx[1]);
  return {h, c};
}

thread_local bool used_fused_layer = false;

// Whether the CPU backend computes an LSTM of this dtype by one fused operator per layer. That depends on the machine
// and on the mode of autograd, so a small LSTM on the CPU shows it.
bool cpu_fuses_lstm(at::ScalarType type) {
  static std::mutex mutex;
  static std::map<std::tuple<at::ScalarType, bool, bool>, bool> known;
  const std::tuple key(type, at::GradMode::is_enabled(), at::globalContext().userEnabledMkldnn());
  const std::lock_guard lock(mutex);
  if (const auto at = known.find(key); at != known.end()) return at->second;
  used_fused_layer = false;
  const auto observer = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        used_fused_layer = used_fused_layer || std::string_view(function.name()) == "aten::mkldnn_rnn_layer";
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  const at::Tensor x = at::zeros({1, 1, 1}, type), gates = at::zeros({4, 1}, type), biases = at::zeros({4}, type);
  at::lstm(x, {x, x}, {gates, gates, biases, biases}, true, 1, 0., true, false, false);
  at::removeCallback(observer);
  return known[key] = used_fused_layer;
}

struct Lstm {
  bool has_biases;
  int64_t layers;
  double dropout;
  bool train, bidirectional, fused;
};

// One layer in one direction: output, hy, cy. `x` is (time, batch, features).
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_layer(const Lstm& lstm, const at::Tensor& x, at::TensorList weights,
                                                          at::Tensor h, at::Tensor c, bool reverse) {
  if (lstm.fused) {
    constexpr int64_t kLstmMode = 2;
    const auto bias = [&](std::size_t i) {
      return lstm.has_biases ? weights[i + 2] : at::zeros(weights[i].sizes(), weights[i].options());
    };
    const auto out = at::mkldnn_rnn_layer(x, weights[0], weights[1], bias(0), bias(1), h, c, reverse, {}, kLstmMode,
                                          h.size(-1), lstm.layers, lstm.has_biases, lstm.bidirectional,
                                          /*batch_first=*/false, lstm.train);
    return {std::get<0>(out), std::get<1>(out), std::get<2>(out)};
  }
  const auto bias = [&](std::size_t i) { return lstm.has_biases ? weights[i + 2] : at::Tensor(); };
  std::vector<at::Tensor> inputs = at::linear(x, weights[0], bias(0)).unbind(0);
  std::vector<at::Tensor> outputs(inputs.size());
  for (std::size_t step = 0; step < inputs.size(); ++step) {
    const std::size_t t = reverse ? inputs.size() - 1 - step : step;
    std::tie(h, c) = lstm_step(at::linear(h, weights[1], bias(1)).add_(inputs[t]), c);
    outputs[t] = h;
  }
  return {at::stack(outputs, 0), h, c};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList hx, at::TensorList params,
                                                    bool has_biases, int64_t layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  const std::size_t directions = bidirectional ? 2 : 1, each = has_biases ? 4 : 2;
  TORCH_CHECK(params.size() == each * directions * static_cast<std::size_t>(layers),
              "sim: lstm with projections is not supported");
  const bool fused = input.numel() != 0 && cpu_fuses_lstm(input.scalar_type());
  const Lstm config{has_biases, layers, dropout, train, bidirectional, fused};
  at::Tensor x = batch_first ? input.transpose(0, 1) : input;
  if (fused) x = x.contiguous();
  const at::Tensor h0 = fused ? hx[0].contiguous() : hx[0], c0 = fused ? hx[1].contiguous() : hx[1];
  std::vector<at::Tensor> hs, cs;
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (std::size_t direction = 0; direction < directions; ++direction) {
      const std::size_t index = static_cast<std::size_t>(layer) * directions + direction;
      const auto at_index = static_cast<int64_t>(index);
      auto [y, h, c] =
          lstm_layer(config, x, params.slice(index * each, each), h0[at_index], c0[at_index], direction == 1);
      outputs.push_back(y);
      hs.push_back(h);
      cs.push_back(c);
    }
    x = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer < layers - 1) x = at::dropout(x, dropout, /*train=*/true);
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(hs, 0), at::stack(cs, 0)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("lstm.input", TORCH_FN(lstm));
  m.impl("lstm_cell", TORCH_FN(lstm_cell));
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("lstm.input", TORCH_FN(lstm));
  m.impl("lstm_cell", TORCH_FN(lstm_cell));
}
// Of the operators that autocast rounds on the CPU, the products of matrices.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace zr::test::sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &zr::test::sim::sdp_choice)
}
