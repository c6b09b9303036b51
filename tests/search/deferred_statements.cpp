// Statements that make, compute and write tensors.
#include <numeric>

#include "search/deferred_language.hpp"

namespace deferred_search {

namespace {
using at::Tensor;

std::vector<int64_t> shape(uint32_t n) {
  static const std::vector<std::vector<int64_t>> shapes{{2, 3}, {3, 2},    {4, 5}, {5, 4}, {3},    {17}, {6},
                                                        {1, 6}, {2, 2, 3}, {33},   {},     {4, 4}, {0},  {1}};
  return shapes[n % shapes.size()];
}
double number(uint32_t n) { return 0.25 * static_cast<double>(n % 17) - 1.5; }
at::ScalarType dtype(uint32_t n) {
  // Mostly fp32, as most constructors.
  static const std::vector<at::ScalarType> types{at::kFloat, at::kFloat, at::kFloat, at::kFloat,  at::kFloat,
                                                 at::kFloat, at::kFloat, at::kLong,  at::kDouble, at::kBFloat16,
                                                 at::kFloat, at::kFloat, at::kFloat, at::kBool,   at::kHalf};
  return types[n % types.size()];
}
std::vector<float> values(uint32_t n, uint32_t seed) {
  std::vector<float> all(n % 20);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<float>(number(seed + 7 * static_cast<uint32_t>(i)));
  return all;
}
// The number of elements of the tensor's storage.
int64_t elements(const Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().nbytes()) / static_cast<int64_t>(tensor.element_size());
}
// Elements from `first` on, as one dimension.
Tensor rest_of(const Tensor& tensor, int64_t first) {
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(tensor.storage(), first, {elements(tensor) - first}, {1});
}
}  // namespace

void add_factories(Rows& rows) {
  rows.push_back({"randn", 6, false, [](auto& e, auto& s) { e.push(torch::randn(shape(s.a), dtype(s.b))); }});
  rows.push_back({"rand", 3, false, [](auto& e, auto& s) { e.push(torch::rand(shape(s.a), dtype(s.b))); }});
  rows.push_back({"zeros", 2, false, [](auto& e, auto& s) { e.push(torch::zeros(shape(s.a), dtype(s.b))); }});
  rows.push_back({"ones", 2, false, [](auto& e, auto& s) { e.push(torch::ones(shape(s.a), dtype(s.b))); }});
  rows.push_back({"full", 2, false, [](auto& e, auto& s) { e.push(torch::full(shape(s.a), number(s.b))); }});
  rows.push_back({"arange", 2, false, [](auto& e, auto& s) { e.push(torch::arange(static_cast<int64_t>(s.a % 21))); }});
  rows.push_back({"arange_float", 2, false,
                  [](auto& e, auto& s) { e.push(torch::arange(0, static_cast<int64_t>(s.a % 21), at::kFloat)); }});
  rows.push_back({"eye", 2, false, [](auto& e, auto& s) { e.push(torch::eye(s.a % 5, s.b % 5)); }});
  rows.push_back({"linspace", 2, false, [](auto& e, auto& s) { e.push(torch::linspace(number(s.a), 3, s.b % 19)); }});
  rows.push_back({"randperm", 2, false, [](auto& e, auto& s) { e.push(torch::randperm(s.a % 21)); }});
  rows.push_back({"randint", 1, false, [](auto& e, auto& s) { e.push(torch::randint(0, 9, shape(s.a))); }});
  rows.push_back({"normal", 2, false, [](auto& e, auto& s) { e.push(at::normal(number(s.a), 0.5, shape(s.b))); }});
  rows.push_back({"tensor_of_vector", 4, false, [](auto& e, auto& s) {
                    const std::vector<float> list = values(s.a, s.b);
                    e.push(e.planted == Planted::dropped_values ? torch::tensor(list).mul_(0) : torch::tensor(list));
                  }});
  rows.push_back({"tensor_of_list", 2, false, [](auto& e, auto& s) {
                    e.push(torch::tensor({{number(s.a), number(s.b)}, {number(s.c), number(s.d)}}));
                  }});
  rows.push_back({"tensor_of_number", 2, false, [](auto& e, auto& s) { e.push(torch::tensor(number(s.a))); }});
  rows.push_back({"from_blob_clone", 1, false, [](auto& e, auto& s) {
                    std::vector<float> list = values(s.a, s.b);
                    e.push(torch::from_blob(list.data(), {std::ssize(list)}, at::kFloat).clone());
                  }});
  rows.push_back({"empty_then_pointer", 3, false, [](auto& e, auto& s) {
                    Tensor made = torch::empty(shape(s.a));
                    float* data = made.template data_ptr<float>();
                    for (int64_t i = 0; i < made.numel(); ++i)
                      data[i] = e.planted == Planted::dropped_pointers ? 0 : static_cast<float>(number(s.b + s.c * i));
                    e.push(made);
                  }});
  rows.push_back({"empty_then_fill", 2, false, [](auto& e, auto& s) {
                    Tensor made = torch::empty(shape(s.a), dtype(s.c));
                    made.fill_(number(s.b));
                    e.push(made);
                  }});
  rows.push_back({"outside", 2, false, [](auto& e, auto& s) { e.push(e.ordinary[s.a % e.ordinary.size()]); }});
}

namespace {
// Operators that write to a tensor.
void add_in_place(Rows& rows) {
  const auto row = [&rows](const std::string& name, uint32_t weight, auto fn) {
    rows.push_back({name, weight, false, [fn](Execution& e, const Statement& s) {
                      const Tensor self = e.tensor(s.a);
                      e.write([fn, s, self, other = e.tensor(s.b)] { fn(self, other, s); });
                    }});
  };
  row("mul_number_", 5, [](Tensor self, const Tensor&, auto& s) { self.mul_(number(s.c)); });
  row("add_number_", 3, [](Tensor self, const Tensor&, auto& s) { self.add_(number(s.c)); });
  row("mul_", 5, [](Tensor self, const Tensor& other, auto&) { self.mul_(other); });
  row("add_", 5, [](Tensor self, const Tensor& other, auto& s) { self.add_(other, number(s.c)); });
  row("mul_arange_", 5, [](Tensor self, const Tensor&, auto&) { self.mul_(torch::arange(self.size(-1))); });
  row("mul_number_of_type_", 2, [](Tensor self, const Tensor&, auto& s) { self.mul_(torch::tensor(number(s.c))); });
  row("clamp_", 2, [](Tensor self, const Tensor&, auto&) { self.clamp_(-0.5, 1.5); });
  row("zero_", 2, [](Tensor self, const Tensor&, auto&) { self.zero_(); });
  row("normal_", 4, [](Tensor self, const Tensor&, auto& s) { self.normal_(0, number(s.c) + 2); });
  row("uniform_", 4, [](Tensor self, const Tensor&, auto&) { self.uniform_(-1, 1); });
  row("bernoulli_", 1, [](Tensor self, const Tensor&, auto&) { self.bernoulli_(0.5); });
  row("exponential_", 1, [](Tensor self, const Tensor&, auto&) { self.exponential_(); });
  row("random_", 1, [](Tensor self, const Tensor&, auto&) { self.random_(0, 9); });
  row("fill_by_element_", 2, [](Tensor self, const Tensor&, auto&) { self.fill_(self.flatten()[0]); });
  row("tril_", 1, [](Tensor self, const Tensor&, auto&) { self.tril_(); });
  row("index_fill_", 1,
      [](Tensor self, const Tensor&, auto& s) { self.index_fill_(0, torch::tensor({0}), number(s.c)); });
  rows.push_back({"fill_", 3, false, [](auto& e, auto& s) {
                    const Tensor self = e.tensor(s.a);
                    if (e.planted == Planted::kept_nothing) rest_of(self, 0).zero_();
                    e.write([self, s] { self.fill_(number(s.b)); });
                  }});
  rows.push_back({"copy_", 5, false, [](auto& e, auto& s) {
                    const Tensor self = e.tensor(s.a), other = e.tensor(s.b);
                    if (e.planted == Planted::kept_nothing) rest_of(self, 0).zero_();
                    e.write([self, other] { self.copy_(other); });
                  }});
  rows.push_back({"add_outside_", 4, false, [](auto& e, auto& s) {
                    const Tensor self = e.tensor(s.a), other = e.ordinary[s.b % e.ordinary.size()];
                    e.write([self, other] { self.add_(other); });
                  }});
  rows.push_back({"change_outside", 3, true, [](auto& e, auto& s) { e.ordinary[s.a % e.ordinary.size()].mul_(1.5); }});
  rows.push_back({"foreach_mul_", 3, false, [](auto& e, auto& s) {
                    std::vector<Tensor> list{e.tensor(s.a), e.tensor(s.b)};
                    if (e.planted == Planted::lost_list) list.pop_back();
                    e.write([list, s] { at::_foreach_mul_(list, number(s.c)); });
                  }});
  rows.push_back({"add_out", 2, false, [](auto& e, auto& s) {
                    if (e.planted == Planted::no_out_resize) return;
                    at::add_out(e.tensor(s.a), e.tensor(s.b), e.tensor(s.c));
                  }});
  rows.push_back({"arange_out", 1, false, [](auto& e, auto& s) {
                    if (e.planted != Planted::no_out_resize)
                      at::arange_out(e.tensor(s.a), static_cast<int64_t>(s.b % 9));
                  }});
}

// Operators with new results.
void add_functional(Rows& rows) {
  const auto row = [&rows](const std::string& name, uint32_t weight, auto fn) {
    rows.push_back(
        {name, weight, false, [fn](Execution& e, const Statement& s) { e.push(fn(e.tensor(s.a), e.tensor(s.b), s)); }});
  };
  row("contiguous", 4, [](const Tensor& a, const Tensor&, auto&) { return a.t().contiguous(); });
  row("clone", 4, [](const Tensor& a, const Tensor&, auto&) { return a.clone(); });
  row("add", 3, [](const Tensor& a, const Tensor& b, auto&) { return a + b; });
  row("mul_number", 3, [](const Tensor& a, const Tensor&, auto& s) { return a * number(s.c); });
  row("divide", 2, [](const Tensor& a, const Tensor&, auto&) { return a / 4; });
  row("matmul", 3, [](const Tensor& a, const Tensor& b, auto&) { return torch::matmul(a, b); });
  row("sum", 2, [](const Tensor& a, const Tensor&, auto& s) { return a.sum(s.c % 3); });
  row("mean", 1, [](const Tensor& a, const Tensor&, auto&) { return a.mean(); });
  row("to", 4, [](const Tensor& a, const Tensor&, auto& s) { return a.to(dtype(s.c)); });
  row("sin", 2, [](const Tensor& a, const Tensor&, auto&) { return a.sin(); });
  row("sign", 1, [](const Tensor& a, const Tensor&, auto&) { return a.sign(); });
  row("diag", 1, [](const Tensor& a, const Tensor&, auto&) { return torch::diag(a); });
  row("cat", 2, [](const Tensor& a, const Tensor& b, auto& s) { return torch::cat({a, b, a}, s.c % 2); });
  row("stack", 1, [](const Tensor& a, const Tensor& b, auto&) { return torch::stack({a, b}); });
  row("where", 2, [](const Tensor& a, const Tensor& b, auto&) { return torch::where(a > 0, a, b); });
  row("cumsum", 1, [](const Tensor& a, const Tensor&, auto&) { return a.cumsum(0); });
  row("outer", 1, [](const Tensor& a, const Tensor& b, auto&) { return torch::outer(a, b); });
  row("pow", 1, [](const Tensor& a, const Tensor&, auto&) { return torch::pow(2.0, a); });
  row("flip", 1, [](const Tensor& a, const Tensor&, auto&) { return a.flip({0}); });
  row("tril", 1, [](const Tensor& a, const Tensor&, auto&) { return a.tril(); });
  row("index", 1, [](const Tensor& a, const Tensor&, auto&) { return a.index_select(0, torch::tensor({0, 0})); });
  row("type_as", 1, [](const Tensor& a, const Tensor& b, auto&) { return a.type_as(b); });
  row("dropout", 2, [](const Tensor& a, const Tensor&, auto&) { return torch::dropout(a, 0.5, true); });
  row("zeros_like", 1, [](const Tensor& a, const Tensor&, auto&) { return torch::zeros_like(a); });
  row("randn_like", 2, [](const Tensor& a, const Tensor&, auto&) { return torch::randn_like(a); });
  row("multinomial", 1,
      [](const Tensor& a, const Tensor&, auto& s) { return torch::multinomial(torch::ones_like(a), 2, s.c % 2 == 0); });
  row("normal_of_tensors", 1, [](const Tensor& a, const Tensor&, auto&) { return at::normal(a, 0.5); });
  row("linalg_norm", 1, [](const Tensor& a, const Tensor&, auto&) { return a / a.norm().clamp_min(1e-3); });
  rows.push_back({"qr", 2, false, [](auto& e, auto& s) {
                    auto [q, r] = torch::linalg_qr(e.tensor(s.a));
                    if (e.planted == Planted::swapped_results) std::swap(q, r);
                    e.push(q);
                    e.push(r);
                  }});
  rows.push_back({"sort", 2, false, [](auto& e, auto& s) {
                    auto [sorted, order] = e.tensor(s.a).sort(/*stable=*/true, -1);
                    if (e.planted == Planted::swapped_results) std::swap(sorted, order);
                    e.push(sorted);
                    e.push(order);
                  }});
  rows.push_back({"unused_dropout", 2, false, [](auto& e, auto& s) {
                    const Tensor same = torch::dropout(e.tensor(s.a), 0.5, false);
                    e.push(e.planted == Planted::lost_alias ? same.clone() : same);
                  }});
}
}  // namespace

void add_operators(Rows& rows) {
  add_in_place(rows);
  add_functional(rows);
}

void add_views(Rows& rows) {
  const auto view = [&rows](const std::string& name, uint32_t weight, auto fn) {
    rows.push_back(
        {name, weight, false, [fn](Execution& e, const Statement& s) { e.push_view(fn(e.tensor(s.a), s)); }});
  };
  view("t", 3, [](const Tensor& a, auto&) { return a.t(); });
  view("select", 3, [](const Tensor& a, auto& s) { return a.select(s.b % 2, s.c % 2); });
  view("slice", 3, [](const Tensor& a, auto& s) { return a.slice(s.b % 2, s.c % 3, 9, 1 + s.d % 2); });
  view("view", 2, [](const Tensor& a, auto&) { return a.view({-1}); });
  view("expand", 1, [](const Tensor& a, auto&) { return a.unsqueeze(0).expand({2, -1, -1}); });
  view("diagonal", 1, [](const Tensor& a, auto&) { return a.diagonal(); });
  view("detach", 2, [](const Tensor& a, auto&) { return a.detach(); });
  view("data", 2, [](const Tensor& a, auto&) { return a.data(); });
  view("variable_data", 1, [](const Tensor& a, auto&) { return a.variable_data(); });
  view("as_strided", 2, [](const Tensor& a, auto& s) {
    return a.as_strided({2, 2}, {static_cast<int64_t>(s.b % 3), 1}, s.c % 3);
  });
  view("reshape", 2, [](const Tensor& a, auto&) { return a.t().reshape({-1}); });
  view("chunk", 1, [](const Tensor& a, auto&) { return a.chunk(2).back(); });
  view("same", 1, [](const Tensor& a, auto&) { return a; });

  const auto change = [&rows](const std::string& name, uint32_t weight, auto fn) {
    rows.push_back({name, weight, true, [fn](Execution& e, const Statement& s) { fn(e, e.tensor(s.a), s); }});
  };
  change("t_", 6, [](auto&, Tensor& a, auto&) { a.t_(); });
  change("transpose_", 3, [](auto&, Tensor& a, auto& s) { a.transpose_(0, s.b % 3); });
  change("swapdims_", 1, [](auto&, Tensor& a, auto&) { a.swapdims_(0, 1); });
  change("unsqueeze_", 2, [](auto&, Tensor& a, auto& s) { a.unsqueeze_(s.b % 2); });
  change("squeeze_", 2, [](auto&, Tensor& a, auto&) { a.squeeze_(); });
  change("as_strided_", 2, [](auto&, Tensor& a, auto& s) { a.as_strided_({2, 2}, {2, 1}, s.b % 2); });
  change("detach_", 1, [](auto&, Tensor& a, auto&) { a.detach_(); });
  change("resize_", 3, [](auto&, Tensor& a, auto& s) {
    const int64_t before = elements(a);
    a.resize_(shape(s.b));
    if (elements(a) > before) rest_of(a, before).fill_(number(s.c));
  });
  change("resize_as_", 1, [](auto& e, Tensor& a, auto& s) {
    const Tensor like = e.tensor(s.b);
    if (a.storage_offset() + like.numel() <= elements(a)) a.resize_as_(like);
  });
  // Within the memory that has values.
  change("set_", 3, [](auto& e, Tensor& a, auto& s) {
    const Tensor source = e.tensor(s.b);
    if (e.planted != Planted::no_set && source.scalar_type() == a.scalar_type()) a.set_(source);
  });
  change("set_storage_", 2, [](auto& e, Tensor& a, auto& s) {
    const Tensor source = e.tensor(s.b);
    if (e.planted != Planted::no_set && elements(source) >= 5 && source.scalar_type() == a.scalar_type())
      a.set_(source.storage(), s.c % 2, {2, 2}, {1, 2});
  });
  change("set_empty_", 1, [](auto&, Tensor& a, auto&) { a.set_(); });
  change("set_data", 4, [](auto& e, Tensor& a, auto& s) {
    if (e.planted != Planted::no_set_data) a.set_data(e.tensor(s.b));
  });
  change("set_data_copy", 2, [](auto& e, Tensor& a, auto& s) {
    if (e.planted != Planted::no_set_data) a.set_data(e.tensor(s.b).clone());
  });
}

}  // namespace deferred_search
