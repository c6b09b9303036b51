#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "multirank/model/operators/cases.hpp"
#include "zr/recompute.hpp"

namespace operators {

namespace {
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Product : torch::autograd::Function<Product> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->save_for_backward({x, w});
    return x.mm(w.t());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradient) {
    const auto saved = context->get_saved_variables();
    return {gradient[0].mm(saved[1]), gradient[0].t().mm(saved[0])};
  }
};

// Uses the values of its weight only in backward.
struct Late : torch::autograd::Function<Late> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->save_for_backward({w});
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradient) {
    const auto w = context->get_saved_variables()[0];
    return {gradient[0].mm(w), w * 3};
  }
};

// Its backward runs another backward.
using Block = std::function<Tensor(const Tensor&)>;
struct Reentrant : torch::autograd::Function<Reentrant> {
  static Tensor forward(AutogradContext* context, const Tensor& x, Block* block, const Tensor&) {
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    context->save_for_backward({x});
    const at::AutoGradMode off(false);
    return (*block)(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradient) {
    auto* block = reinterpret_cast<Block*>(context->saved_data["block"].toInt());
    const auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    Tensor y;
    {
      const at::AutoGradMode on(true);
      y = (*block)(x);
    }
    torch::autograd::backward({y}, {gradient[0]});
    return {x.grad(), Tensor(), Tensor()};
  }
};
// Blocks live until the program ends, because the graph refers to them by address.
Tensor reentrant(const Tensor& x, Block block, const Tensor& w) {
  static std::vector<std::unique_ptr<Block>> blocks;
  blocks.push_back(std::make_unique<Block>(std::move(block)));
  return Reentrant::apply(x, blocks.back().get(), w);
}
Tensor nested(const Tensor& x, const Tensor& w, int depth) {
  if (depth == 0) return x.mm(w).tanh();
  return reentrant(
      x, [w, depth](const Tensor& y) { return nested(y, w, depth - 1); }, w);
}

Tensor deep(const Tensor& x, const Tensor& w, int depth) {
  if (depth == 0) return torch::dropout(x.mm(w).tanh(), 0.2, true);
  return zr::checkpoint([w, depth](const Tensor& y) { return deep(torch::gelu(y.mm(w.t())), w, depth - 1); }, x);
}

const char* const kHeld = "gradients.overlap=false";
}  // namespace

const std::vector<Case>& autograds() {
  using W = std::vector<Tensor>;
  static const std::vector<Case> cases{
      bare("a custom function", {{16, 16}}, [](W& w, const Tensor& x) -> Outputs { return {Product::apply(x, w[0])}; }),
      bare("a weight used in backward alone", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs { return {Late::apply(x, w[0])}; }),
      bare("double backward", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             const auto y = x.mm(w[0]).tanh();
             const auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, true, true);
             return {gradient[0].pow(2).sum() + y.sum()};
           }),
      bare(
          "reentrant backward", {{16, 16}},
          [](W& w, const Tensor& x) -> Outputs {
            const auto weight = w[0];
            return {reentrant(
                x, [weight](const Tensor& y) { return y.mm(weight).tanh().mm(weight.t()); }, weight)};
          },
          kHeld),
      bare(
          "reentrant backward, 80 deep, on engine threads", {{16, 16}},
          [](W& w, const Tensor& x) -> Outputs { return {nested(x, w[0], 80)}; }, kHeld),
      bare("a checkpointed block", {{16, 16}, {16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {zr::checkpoint(
                 [w](const Tensor& y, double p) { return torch::dropout(y.mm(w[0]).tanh(), p, true).mm(w[1]).exp(); },
                 x, 0.3)};
           }),
      bare("checkpointed blocks in a row, one weight", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             Tensor y = x;
             for (int i = 0; i < 4; ++i)
               y = zr::checkpoint([w](const Tensor& z) { return torch::dropout(z.mm(w[0]).tanh(), 0.1, true); }, y);
             return {y.mm(w[0])};
           }),
      bare("nested checkpointed blocks", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs { return {deep(x, w[0], 3)}; }),
      bare("a checkpointed block whose input wants no gradient", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {zr::checkpoint([w](const Tensor& y) { return y.mm(w[0]).tanh().mm(w[0]); }, x.detach())};
           }),
      bare("autocast", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             const at::DeviceType device = x.device().type();
             at::autocast::set_autocast_dtype(device, at::kBFloat16);
             at::autocast::set_autocast_enabled(device, true);
             const auto y = torch::linear(x, w[0]), z = torch::linear(y, w[0]);
             const auto again = zr::checkpoint([w](const Tensor& v) { return torch::linear(v, w[0]).tanh(); }, x);
             at::autocast::clear_cache();
             at::autocast::set_autocast_enabled(device, false);
             return {y, z, again};
           }),
      bare("without gradients, in inference mode", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             Tensor a, b = torch::empty({8, 16}, x.device());
             {
               const torch::NoGradGuard no_grad;
               a = x.mm(w[0]);
             }
             {
               const c10::InferenceMode inference;
               const auto y = x.detach().clone().mm(w[0]);
               b.copy_(y.mm(w[0].t()));
             }
             return {x.mm(w[0]) + a, b.clone()};
           }),
      bare("a forward on another thread", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             Tensor y;
             std::thread([&] { y = x.mm(w[0]).tanh(); }).join();
             return {y};
           }),
      bare("a frozen weight beside trained ones", {{16, 16}, {16, 2}, {2, 16}},
           [](W& w, const Tensor& x) -> Outputs { return {x.mm(w[0].detach()) + x.mm(w[1]).mm(w[2])}; }),
      bare("a weight that is not used", {{16, 16}, {5, 3}},
           [](W& w, const Tensor& x) -> Outputs { return {x.mm(w[0])}; }),
      {"module->clone()", [] { return torch::nn::Linear(16, 16).ptr(); },
       [](torch::nn::Module& module, const Tensor& x) -> Outputs {
         const auto copy = module.clone();
         return {x.mm(copy->parameters()[0].detach()), module.as<torch::nn::LinearImpl>()->forward(x)};
       }},
      {"module->zero_grad()", [] { return torch::nn::Linear(16, 16).ptr(); },
       [](torch::nn::Module& module, const Tensor& x) -> Outputs {
         module.zero_grad();
         return {module.as<torch::nn::LinearImpl>()->forward(x)};
       }},
  };
  return cases;
}

}  // namespace operators
