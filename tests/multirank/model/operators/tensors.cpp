#include <sstream>

#include "multirank/model/operators/cases.hpp"

namespace operators {

const std::vector<Case>& tensors() {
  using W = std::vector<Tensor>;
  static const std::vector<Case> cases{
      bare("mm", {{16, 16}}, [](W& w, const Tensor& x) -> Outputs { return {x.mm(w[0])}; }),
      bare("a view taken first, used twice", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             const auto view = w[0].t();
             return {x.mm(view) + x.mul(2).mm(view)};
           }),
      bare("einsum", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {torch::einsum("bi,oi->bo", {x, w[0]})};
           }),
      bare("matmul of a batch", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {torch::matmul(x.unsqueeze(0).expand({3, 8, 16}), w[0])};
           }),
      bare("bmm with an expanded weight", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {torch::bmm(x.unsqueeze(0).expand({3, 8, 16}), w[0].unsqueeze(0).expand({3, 16, 16}))};
           }),
      bare("slices and chunks", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             const auto half = w[0].chunk(2, 0);
             return {x.mm(half[0].t()), x.mm(w[0].slice(0, 3, 9).t()), x * w[0][2]};
           }),
      bare("index and index_select", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {w[0].index({torch::tensor({1, 3}, x.device())}),
                     w[0].index_select(0, torch::tensor({2, 2}, x.device()))};
           }),
      bare("lists of tensors", {{16, 16}, {16, 16}},
           [](W& w, const Tensor&) -> Outputs {
             return {torch::cat({w[0], w[1]}), torch::stack({w[0], w[1]})};
           }),
      bare("optional tensors", {{16, 16}, {16, 16}},
           [](W& w, const Tensor&) -> Outputs {
             return {torch::addcmul(w[0], w[0], w[1]), torch::where(w[0] > 0, w[0], w[1]),
                     torch::clamp(w[0], w[1], std::nullopt)};
           }),
      bare("detach, variable_data, tensor_data", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {x.mm(w[0].detach()) + x.mm(w[0]), x.mm(w[0].variable_data()), x.mm(w[0].tensor_data())};
           }),
      bare("contiguous and reshape", {{16, 16}},
           [](W& w, const Tensor&) -> Outputs {
             return {w[0].t().reshape({256}), w[0].t().contiguous(), w[0].contiguous() * 2};
           }),
      bare("other dtypes", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {x.to(torch::kDouble).mm(w[0].to(torch::kDouble)),
                     x.to(torch::kBFloat16).mm(w[0].to(torch::kBFloat16))};
           }),
      bare("a standardised weight, norms", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {x.mm((w[0] - w[0].mean(1, true)) / w[0].std(1, true, true)), w[0].norm(), w[0].pow(2).sum()};
           }),
      bare("item", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {x * w[0][0][0].item<float>() * w[0].sum().item<float>(), x.mm(w[0])};
           }),
      bare("equal and is_nonzero", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {torch::equal(w[0], w[0].clone()) && w[0][0][0].is_nonzero() ? x.mm(w[0]) : x};
           }),
      bare("one weight used twice", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs { return {x.mm(w[0]).relu().mm(w[0].t())}; }),
      bare("out= and in place on activations", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             const Tensor out = torch::empty({8, 16}, x.device());
             {
               const torch::NoGradGuard no_grad;
               at::mm_out(const_cast<Tensor&>(out), x, w[0]);
               out.addmm_(x, w[0]);
             }
             return {out + x.mm(w[0])};
           }),
      bare("softmax of a weight", {{16, 16}},
           [](W& w, const Tensor&) -> Outputs {
             return {torch::softmax(w[0], -1), torch::log_softmax(w[0], 0)};
           }),
      bare("printing", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             std::ostringstream text;
             text << w[0] << w[0].toString();
             return {x.mm(w[0]) * static_cast<double>(text.str().size() % 7)};
           }),
      bare("a large weight, several threads", {{512, 512}},
           [](W& w, const Tensor&) -> Outputs { return {w[0] * 2 + 1}; }),
      bare("more views", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {w[0].diagonal() * 2,
                     w[0].unfold(0, 4, 4) * 2,
                     w[0].movedim(0, 1).mul(3),
                     w[0].as_strided({4, 4}, {2, 1}, 3) * x.slice(0, 0, 4).slice(1, 0, 4),
                     w[0].tensor_split(3)[1] + 1,
                     w[0].detach().view(torch::kInt) / 2,
                     w[0].squeeze().unsqueeze(0).flatten() * 2};
           }),
      bare("unbind and split", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             return {x * w[0].unbind(0)[3], torch::cat(w[0].split(5)), w[0].unflatten(0, {4, 4}).sum(0)};
           }),
      bare("two weights in one storage before", {{512}},
           [](W& w, const Tensor& x) -> Outputs {
             const auto a = w[0].slice(0, 0, 256).view({16, 16}), b = w[0].slice(0, 256, 512).view({16, 16});
             return {x.mm(a).relu().mm(b.t())};
           }),
      bare("changed in place", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             {
               const torch::NoGradGuard no_grad;
               w[0].mul_(2);
             }
             return {x.mm(w[0])};
           }),
      bare("changed in place through views", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             {
               const torch::NoGradGuard no_grad;
               w[0].t().select(0, 2).fill_(3);
               w[0].slice(0, 1, 3).copy_(x.slice(0, 0, 2));
             }
             return {x.mm(w[0])};
           }),
      bare("initialised again", {{16, 16}, {64, 48}},
           [](W& w, const Tensor& x) -> Outputs {
             torch::nn::init::kaiming_uniform_(w[0]);
             torch::nn::init::orthogonal_(w[1]);
             return {x.mm(w[0]), w[1].sum()};
           }),
      bare("changed by index", {{16, 16}},
           [](W& w, const Tensor& x) -> Outputs {
             {
               const torch::NoGradGuard no_grad;
               w[0].index_put_({torch::tensor({1, 3}, x.device())}, torch::ones({2, 16}, x.device()));
               w[0].clamp_(-1, 1);
             }
             return {x.mm(w[0])};
           }),
  };
  return cases;
}

}  // namespace operators
