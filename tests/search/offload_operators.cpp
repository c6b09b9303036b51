// The operators: each family that saves tensors for backward.
#include "search/offload_language.hpp"

namespace zr::test::offload {

namespace {
using torch::Tensor;
using In = const Arguments&;

Tensor f32(const Tensor& t) { return t.to(torch::kFloat); }
Tensor image(const Tensor& t) { return f32(t).view({1, 1, 4, 4}); }
Tensor channels(const Tensor& t) { return f32(t).reshape({2, 2, 2, 2}); }
Tensor above_zero(const Tensor& t) { return t.abs() + 0.5; }
// Symmetric, positive definite.
Tensor definite(const Tensor& t) { return f32(t).mm(f32(t).t()) + 2 * torch::eye(4); }
Tensor invertible(const Tensor& t) { return f32(t).tanh() + 4 * torch::eye(4); }
Tensor order(const Tensor& t) { return t.detach().argsort(int64_t{1}); }
Tensor classes(const Tensor& t) { return t.detach().argmax(1); }
bool writable(const Tensor& t) { return !(t.is_leaf() && t.requires_grad()) && t.stride(0) != 0 && t.stride(1) != 0; }
Tensor heads(const Tensor& t) { return f32(t).view({1, 2, 4, 2}); }
}  // namespace

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all{
      // elementwise
      {"exp", [](In i) { return i.a.tanh().exp(); }},
      {"log", [](In i) { return above_zero(i.a).log(); }},
      {"sqrt", [](In i) { return above_zero(i.a).sqrt(); }},
      {"rsqrt", [](In i) { return above_zero(i.a).rsqrt(); }},
      {"reciprocal", [](In i) { return above_zero(i.a).reciprocal(); }},
      {"sin", [](In i) { return i.a.sin(); }},
      {"atan", [](In i) { return i.a.atan(); }},
      {"asinh", [](In i) { return i.a.asinh(); }},
      {"erf", [](In i) { return i.a.erf(); }},
      {"lgamma", [](In i) { return f32(above_zero(i.a)).lgamma(); }},
      {"sigmoid", [](In i) { return i.a.sigmoid(); }},
      {"log_sigmoid", [](In i) { return torch::log_sigmoid(i.a); }},
      {"softplus", [](In i) { return torch::softplus(i.a); }},
      {"relu", [](In i) { return i.a.relu(); }},
      {"leaky_relu", [](In i) { return torch::leaky_relu(i.a, 0.1); }},
      {"elu", [](In i) { return torch::elu(i.a); }},
      {"gelu", [](In i) { return torch::gelu(i.a); }},
      {"silu", [](In i) { return torch::silu(i.a); }},
      {"mish", [](In i) { return torch::mish(i.a); }},
      {"hardswish", [](In i) { return torch::hardswish(i.a); }},
      {"glu", [](In i) { return torch::glu(i.a, 1); }},
      {"prelu", [](In i) { return torch::prelu(f32(i.a), i.w.select(0, 0).slice(0, 0, 1)); }},
      {"clamp", [](In i) { return i.a.clamp(-0.5, 0.5); }},
      {"pow", [](In i) { return above_zero(i.a).pow(1.5); }},
      {"pow of tensors", [](In i) { return above_zero(i.a).pow(i.b.tanh()); }},
      {"multiply", [](In i) { return i.a * i.b.tanh(); }},
      {"divide", [](In i) { return i.a / above_zero(i.b); }},
      {"addcmul", [](In i) { return torch::addcmul(f32(i.a), f32(i.b).tanh(), i.w); }},
      {"lerp", [](In i) { return torch::lerp(f32(i.a), f32(i.b), i.w); }},
      {"maximum", [](In i) { return torch::maximum(i.a, i.b.to(i.a.dtype())); }},
      {"where", [](In i) { return torch::where(i.a > 0, i.a * 2, i.b.to(i.a.dtype())); }},
      {"masked_fill", [](In i) { return i.a.masked_fill(i.b > 0, 0.25); }},
      {"atan2", [](In i) { return torch::atan2(f32(i.a), above_zero(f32(i.b))); }},
      {"hypot", [](In i) { return torch::hypot(f32(i.a), above_zero(f32(i.b))); }},
      // reductions and scans
      {"sum of rows", [](In i) { return i.a * i.a.sum(1, true).tanh(); }},
      {"product", [](In i) { return i.a.tanh().prod(1, true) * i.a; }},
      {"variance", [](In i) { return f32(i.a) / (f32(i.a).var(1, true, true) + 1); }},
      {"norm", [](In i) { return f32(i.a) / (f32(i.a).norm(2, 1, true) + 1); }},
      {"largest norm", [](In i) { return f32(i.a) / (torch::linalg_vector_norm(f32(i.a), INFINITY) + 1); }},
      {"log_sum_exp", [](In i) { return i.a - torch::logsumexp(f32(i.a), 1, true); }},
      {"largest", [](In i) { return i.a - std::get<0>(i.a.max(1, true)); }},
      // of a matrix with stride 0, libtorch 2.11 computes median and kthvalue from memory that nothing has set
      {"median", [](In i) { return i.a - std::get<0>(i.a.clone(at::MemoryFormat::Contiguous).median(1, true)); }},
      {"cumulative sum", [](In i) { return i.a.cumsum(1).tanh(); }},
      {"cumulative product", [](In i) { return f32(i.a).tanh().cumprod(1); }},
      {"cumulative maximum", [](In i) { return std::get<0>(i.a.cummax(1)); }},
      {"softmax", [](In i) { return torch::softmax(i.a, i.number % 2); }},
      {"log_softmax", [](In i) { return torch::log_softmax(i.a, 1); }},
      // norms
      {"layer_norm", [](In i) { return torch::layer_norm(f32(i.a), {4}, i.w.select(0, 0), i.w.select(0, 1)); }},
      {"group_norm", [](In i) { return torch::group_norm(channels(i.a), 2, i.w[0].slice(0, 0, 2)); }},
      {"batch_norm", [](In i) { return torch::batch_norm(f32(i.a), i.w[0], i.w[1], {}, {}, true, 0.1, 1e-5, false); }},
      {"instance_norm",
       [](In i) { return torch::instance_norm(channels(i.a), {}, {}, {}, {}, true, 0.1, 1e-5, false); }},
      {"rms_norm", [](In i) { return torch::rms_norm(f32(i.a), {4}, i.w[0]); }},
      {"weight_norm",
       [](In i) {
         return torch::_weight_norm(f32(i.a), i.w.select(1, 0).view({4, 1}));
       }},
      // products
      {"mm", [](In i) { return f32(i.a).mm(f32(i.b)) * 0.3; }},
      {"linear", [](In i) { return torch::linear(f32(i.a), i.w, i.w[0]); }},
      {"addmm", [](In i) { return torch::addmm(i.w, f32(i.a), f32(i.b).t()) * 0.3; }},
      {"bmm",
       [](In i) {
         return torch::bmm(f32(i.a).expand({3, 4, 4}), i.w.expand({3, 4, 4})).mean(0);
       }},
      {"einsum",
       [](In i) {
         return torch::einsum("ij,kj->ik", {f32(i.a), i.w});
       }},
      {"outer", [](In i) { return torch::outer(f32(i.a)[0], f32(i.b)[1]); }},
      {"bilinear",
       [](In i) {
         return torch::bilinear(f32(i.a), f32(i.b), i.w.expand({2, 4, 4}), {});
       }},
      // kron saves views whose versions are their own, so libtorch 2.11 misses later changes of its arguments
      {"kron", [](In i) { return torch::kron(f32(i.a).slice(0, 0, 2).clone(), i.w.slice(1, 0, 2).clone()); }},
      // convolution, pooling, images
      {"conv2d",
       [](In i) {
         return torch::conv2d(image(i.a), i.w.slice(0, 0, 3).slice(1, 0, 3).view({1, 1, 3, 3}), {}, 1, 1);
       }},
      {"conv1d", [](In i) { return torch::conv1d(f32(i.a).unsqueeze(0), i.w.unsqueeze(2)); }},
      {"conv_transpose2d",
       [](In i) {
         return torch::conv_transpose2d(image(i.a), i.w.slice(0, 0, 2).slice(1, 0, 2).reshape({1, 1, 2, 2}));
       }},
      {"max_pool2d", [](In i) { return torch::max_pool2d(image(i.a), 2) * image(i.b).slice(2, 0, 2).slice(3, 0, 2); }},
      {"avg_pool2d", [](In i) { return torch::avg_pool2d(image(i.a).square(), 3, 1, 1); }},
      {"adaptive_max_pool2d",
       [](In i) {
         return std::get<0>(torch::adaptive_max_pool2d(image(i.a), {3, 3})).tanh();
       }},
      {"max_pool1d", [](In i) { return torch::max_pool1d(f32(i.a).unsqueeze(0), 2).tanh(); }},
      {"upsample",
       [](In i) {
         return torch::upsample_bilinear2d(image(i.a), at::IntArrayRef({6, 6}), false).tanh();
       }},
      {"grid_sampler",
       [](In i) {
         return torch::grid_sampler(image(i.a), f32(i.b).tanh().view({1, 2, 4, 2}), 0, 0, false);
       }},
      {"reflection_pad",
       [](In i) {
         return torch::reflection_pad2d(image(i.a), {1, 1, 1, 1}).square();
       }},
      {"unfold", [](In i) { return i.a.unfold(1, 2, 1).square(); }},
      // selection by indices
      {"index_select", [](In i) { return i.a.index_select(0, classes(i.b)).square(); }},
      {"gather", [](In i) { return i.a.gather(1, order(i.b)); }},
      {"scatter_add", [](In i) { return i.a.scatter_add(1, order(i.b), i.b.to(i.a.dtype()).tanh()); }},
      {"index", [](In i) { return i.a.index({classes(i.b)}); }},
      {"index_put", [](In i) { return i.a.index_put({classes(i.b)}, i.b.to(i.a.dtype()), true); }},
      {"masked_select", [](In i) { return i.a.masked_select(i.b > 0).sum(); }},
      {"take", [](In i) { return i.a.take(order(i.b)); }},
      {"embedding", [](In i) { return torch::embedding(i.w, order(i.a)).sum(1); }},
      {"embedding of a value", [](In i) { return torch::embedding(f32(i.a), order(i.b)).sum(1); }},
      {"sort", [](In i) { return std::get<0>(i.a.sort(1)); }},
      {"topk", [](In i) { return std::get<0>(i.a.topk(2, 1)).tanh(); }},
      {"kthvalue",
       [](In i) { return i.a - std::get<0>(i.a.clone(at::MemoryFormat::Contiguous).kthvalue(2, 1, true)); }},
      {"roll and flip", [](In i) { return i.a.roll(1, 0).flip(1) * i.a; }},
      {"triu", [](In i) { return i.a.triu().tanh() + i.a.tril() * i.b; }},
      // linear algebra
      {"inverse", [](In i) { return torch::linalg_inv(invertible(i.a)); }},
      {"solve", [](In i) { return torch::linalg_solve(invertible(i.a), f32(i.b)); }},
      {"cholesky", [](In i) { return torch::linalg_cholesky(definite(i.a)); }},
      {"triangular solve", [](In i) { return torch::linalg_solve_triangular(invertible(i.a).triu(), f32(i.b), true); }},
      {"determinant", [](In i) { return std::get<1>(torch::linalg_slogdet(invertible(i.a))); }},
      {"qr", [](In i) { return std::get<1>(torch::linalg_qr(invertible(i.a))); }},
      {"eigenvalues", [](In i) { return torch::linalg_eigvalsh(definite(i.a)); }},
      {"singular values", [](In i) { return torch::linalg_svdvals(invertible(i.a)); }},
      {"matrix exponential", [](In i) { return torch::matrix_exp(f32(i.a).tanh() * 0.3); }},
      {"cdist", [](In i) { return torch::cdist(f32(i.a), f32(i.b) + 1); }},
      // cells and attention
      {"lstm_cell",
       [](In i) {
         const Tensor four = torch::cat({i.w, i.w * 0.5, i.w.t(), i.w + 0.1});
         return std::get<0>(torch::lstm_cell(f32(i.a), {f32(i.b), f32(i.a).tanh()}, four, four, {}, {}));
       }},
      {"gru_cell",
       [](In i) {
         const Tensor three = torch::cat({i.w, i.w * 0.5, i.w.t()});
         return torch::gru_cell(f32(i.a), f32(i.b), three, three, {}, {});
       }},
      {"rnn_cell", [](In i) { return torch::rnn_tanh_cell(f32(i.a), f32(i.b), i.w, i.w.t(), {}, {}); }},
      {"attention", [](In i) { return torch::scaled_dot_product_attention(heads(i.a), heads(i.b), heads(i.w)); }},
      {"causal attention with dropout",
       [](In i) { return torch::scaled_dot_product_attention(heads(i.a), heads(i.b), heads(i.w), {}, 0.3, true); }},
      // losses
      {"cross_entropy", [](In i) { return torch::cross_entropy_loss(f32(i.a), classes(i.b)); }},
      {"cross_entropy of probabilities",
       [](In i) { return torch::cross_entropy_loss(f32(i.a), torch::softmax(f32(i.b), 1)); }},
      {"nll_loss",
       [](In i) { return torch::nll_loss(torch::log_softmax(f32(i.a), 1), classes(i.b), i.w[0].detach().abs()); }},
      {"mse_loss", [](In i) { return torch::mse_loss(f32(i.a), f32(i.b)); }},
      {"smooth_l1_loss", [](In i) { return torch::smooth_l1_loss(f32(i.a), f32(i.b)); }},
      {"huber_loss", [](In i) { return torch::huber_loss(f32(i.a), f32(i.b)); }},
      {"binary_cross_entropy",
       [](In i) { return torch::binary_cross_entropy(f32(i.a).sigmoid(), f32(i.b).detach().sigmoid()); }},
      {"binary_cross_entropy_with_logits",
       [](In i) { return torch::binary_cross_entropy_with_logits(f32(i.a), f32(i.b).detach().sigmoid()); }},
      {"kl_div", [](In i) { return torch::kl_div(torch::log_softmax(f32(i.a), 1), torch::softmax(f32(i.b), 1)); }},
      {"cosine_similarity", [](In i) { return torch::cosine_similarity(f32(i.a), f32(i.b) + 0.1); }},
      {"ctc_loss",
       [](In i) {
         const Tensor lengths = torch::full({2}, 2, torch::kLong);
         return torch::ctc_loss(torch::log_softmax(f32(i.a).view({4, 2, 2}), 2), torch::ones({2, 1}, torch::kLong),
                                lengths * 2, torch::ones({2}, torch::kLong), 0);
       }},
      // complex
      {"complex product", [](In i) { return torch::complex(f32(i.a), f32(i.b)) * torch::complex(i.w, f32(i.a)); }},
      {"complex absolute value", [](In i) { return torch::complex(f32(i.a), above_zero(f32(i.b))).abs(); }},
      {"fft",
       [](In i) {
         return torch::fft_fft2(f32(i.a)) *
                torch::view_as_complex(f32(i.b).reshape({4, 2, 2}).contiguous()).repeat({1, 2});
       }},
      {"rfft", [](In i) { return torch::fft_irfft(torch::fft_rfft(f32(i.a)).pow(2)); }},
      // types
      {"to bf16", [](In i) { return i.a.to(torch::kBFloat16).tanh(); }},
      {"to fp64", [](In i) { return i.a.to(torch::kDouble).tanh(); }},
      {"to fp16", [](In i) { return i.a.to(torch::kHalf).sigmoid(); }},
      // random
      {"dropout", [](In i) { return torch::dropout(i.a, 0.3, true); }},
      {"feature dropout", [](In i) { return torch::feature_dropout(channels(i.a), 0.3, true); }},
      {"rrelu", [](In i) { return torch::rrelu(f32(i.a), 0.1, 0.3, true); }},
      // views and copies
      {"transpose", [](In i) { return i.a.t(); }},
      {"slice", [](In i) { return i.a.slice(1, 1, 3) * i.b.slice(1, 0, 2); }},
      {"strided slice", [](In i) { return i.a.slice(0, 0, 4, 2) * i.b.slice(0, 1, 4, 2); }},
      {"expand",
       [](In i) {
         return i.a.select(i.number % 2, i.number % 4).expand({4, 4});
       }},
      {"as_strided",
       [](In i) {
         return i.a.contiguous().as_strided({4, 4}, {1, 3}, 1).sin();
       }},
      {"diagonal", [](In i) { return i.a * i.a.diagonal(); }},
      {"unbind and stack",
       [](In i) {
         const auto rows = i.a.unbind(i.number % 2);
         return torch::stack({rows[0] * rows[1], rows[2] * rows[3]});
       }},
      {"chunk",
       [](In i) {
         const auto parts = i.a.chunk(2, 1);
         return parts[0] * parts[1].sigmoid();
       }},
      {"cat",
       [](In i) {
         return torch::cat({i.a, i.b.to(i.a.dtype())}, 1).square();
       }},
      {"empty slice",
       [](In i) {
         return torch::cat({i.a.slice(0, 2, 2).exp(), i.a}) * i.a;
       }},
      {"repeat",
       [](In i) {
         return i.a.repeat({2, 1}).tanh();
       }},
      {"detach", [](In i) { return i.a.detach() * i.b; }},
      // in place
      {"multiply in place", [](In i) { return writable(i.a) ? i.a.mul_(0.75) : i.a; }},
      {"tanh in place", [](In i) { return writable(i.a) ? i.a.tanh_() : i.a; }},
      {"add in place", [](In i) { return writable(i.a) ? i.a.add_(i.b) : i.a; }},
      {"fill a view",
       [](In i) {
         if (writable(i.a)) i.a.narrow(0, 1, 2).mul_(0.5);
         return i.a;
       }},
      {"copy in place", [](In i) { return writable(i.a) ? i.a.copy_(i.b) : i.a; }},
      {"new values in place",
       [](In i) {
         Tensor c = i.a.clone();
         c.mul_(i.b);
         c.sigmoid_();
         return c;
       }},
  };
  return all;
}

}  // namespace zr::test::offload
