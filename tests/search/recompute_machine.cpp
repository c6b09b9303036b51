// Executes the statements.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "search/recompute_language.hpp"
#include "zr/recompute.hpp"

namespace zr::test::recompute {

namespace {
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Values = std::vector<Tensor>;

constexpr int kSteps = 3;

std::string bytes(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  const Tensor dense = tensor.detach().contiguous();
  return std::string(c10::toString(dense.scalar_type())) +
         std::string(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
}

struct Product : torch::autograd::Function<Product> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& y) {
    const Tensor result = x.tanh() * y;
    context->save_for_backward({x, y, result});
    context->saved_data["scale"] = 0.5;
    return result * 0.5;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradient) {
    const auto saved = context->get_saved_variables();
    const double scale = context->saved_data["scale"].toDouble();
    return {gradient[0] * saved[1] * scale + saved[2] * 0.01, gradient[0] * saved[0].tanh() * scale};
  }
};

// Autocast of the CPU in bf16. At the end of the outermost region the cache is cleared, unless a careless program
// forgets it.
struct Autocast {
  Autocast(bool cache, bool careless)
      : enabled(at::autocast::is_autocast_enabled(at::kCPU)),
        cached(at::autocast::is_autocast_cache_enabled()),
        careless(careless) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0 && !careless) at::autocast::clear_cache();
    at::autocast::set_autocast_cache_enabled(cached);
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
  }
  Autocast(const Autocast&) = delete;
  bool enabled, cached, careless;
};

// The close that ends the statement that opens at `at`, or the end of the program.
std::size_t end_of(const Program& program, std::size_t at) {
  int depth = 1;
  while (++at < program.size()) {
    const Kind kind = program[at].kind;
    if (kind == Kind::block || kind == Kind::autocast) ++depth;
    if (kind == Kind::close && --depth == 0) break;
  }
  return at;
}

class Machine {
 public:
  Machine(const Program& program, bool checkpoint, Fault fault)
      : program_(program), checkpoint_(checkpoint), fault_(fault) {
    torch::manual_seed(11);
    for (int i = 0; i < 3; ++i) parameters_.push_back(torch::randn({4, 4}).mul_(0.5).requires_grad_());
    vectors_ = {torch::ones({4}).requires_grad_(), torch::zeros({4}).requires_grad_()};
    buffers_ = {torch::zeros({4}), torch::ones({4}), torch::full({4}, 0.5f),
                torch::arange(16, torch::kFloat).view({4, 4}).sin()};
  }

  void step(int number, Outcome& outcome) {
    const Tensor x = torch::randn({4, 4}).requires_grad_(), constant = torch::randn({4, 4});
    Values values{x, x * 1.25, constant};
    execute(0, program_.size(), values, false);
    const std::string at = " of step " + std::to_string(number);
    for (std::size_t i = 1; i < values.size(); ++i)
      outcome.results.emplace_back("value " + std::to_string(i) + at, bytes(values[i]));
    backward(values);
    outcome.results.emplace_back("gradient of the input" + at, bytes(x.grad()));
    for (const auto& list : {parameters_, vectors_})
      for (const Tensor& parameter : list) outcome.results.emplace_back("gradient" + at, bytes(parameter.grad()));
    for (const Tensor& buffer : buffers_) outcome.results.emplace_back("buffer" + at, bytes(buffer));
    outcome.results.emplace_back("hooks" + at, std::to_string(*hooks_));
    outcome.results.emplace_back("generator" + at, bytes(at::globalContext().defaultGenerator(at::kCPU).get_state()));
    outcome.results.emplace_back("own generator" + at, bytes(own_.get_state()));
    update();
  }

 private:
  Tensor& pick(Values& values, uint32_t i) const { return values[i % values.size()]; }
  const Tensor& parameter(uint32_t i) const { return parameters_[i % parameters_.size()]; }
  bool is_faulty(Kind kind) const { return checkpoint_ && fault_ == kind; }

  // Statements [at, end). `again`: in a block that runs again.
  void execute(std::size_t at, std::size_t end, Values& values, bool again) {
    for (; at < end; ++at) {
      const Statement& statement = program_[at];
      if (statement.kind == Kind::block || statement.kind == Kind::autocast) {
        const std::size_t close = std::min(end_of(program_, at), end);
        if (statement.kind == Kind::block) {
          block(statement, at + 1, close, values, again);
        } else {
          const Autocast region(statement.a % 4 != 0, statement.b % 4 == 0);
          execute(at + 1, close, values, again);
        }
        at = close;
      } else if (statement.kind < Kind::multiply_in_place) {
        Tensor value = make(statement, values);
        if (again && is_faulty(statement.kind)) damage(value);
        values.push_back(value);
      } else if (statement.kind < Kind::hook) {
        if (!(again && statement.kind < Kind::change_parameter && is_faulty(statement.kind))) change(statement, values);
      } else {
        affect(statement, values, again);
      }
    }
  }

  static void damage(Tensor& value) {
    const torch::NoGradGuard no_grad;
    // Without a change of the version; a view in a wrong layout.
    value.data().copy_(value.t().clone() * 1.25 + 0.125);
  }

  void block(const Statement& statement, std::size_t begin, std::size_t end, Values& values, bool again) {
    const uint32_t count = 1 + statement.b % 3, captures = statement.c % 3;
    Values inputs, captured;
    for (uint32_t i = 0; i < count; ++i) inputs.push_back(pick(values, statement.a + i));
    for (uint32_t i = 0; i < captures; ++i) captured.push_back(pick(values, statement.b + 7 * i));
    const auto runs = std::make_shared<int>(0);
    const auto body = [=, this](const Values& given) {
      Values inner = given;
      inner.insert(inner.end(), captured.begin(), captured.end());
      const bool second = again || (*runs)++ > 0;
      if (second && is_faulty(Kind::block)) damage(inner[0]);
      const std::size_t before = inner.size();
      execute(begin, end, inner, second);
      // The last two values that the block made; an input if it made none.
      const std::size_t made = std::min<std::size_t>(inner.size() - before, 2);
      return Values(inner.end() - static_cast<std::ptrdiff_t>(std::max<std::size_t>(made, 1)), inner.end());
    };
    const Values results = checkpoint_ ? checkpointed(statement, body, inputs) : body(inputs);
    values.insert(values.end(), results.begin(), results.end());
  }

  template <class Body>
  static Values checkpointed(const Statement& statement, const Body& body, const Values& inputs) {
    if (statement.c / 3 % 4 == 0) return checkpoint(body, inputs);  // tensors in a container
    if (inputs.size() == 1) return checkpoint([body](const Tensor& a) { return body({a}); }, inputs[0]);
    if (inputs.size() == 2)
      return checkpoint([body](const Tensor& a, const Tensor& b) { return body({a, b}); }, inputs[0], inputs[1]);
    return checkpoint(
        [body](const Tensor& a, const Tensor& b, const Tensor& c) {
          return body({a, b, c});
        },
        inputs[0], inputs[1], inputs[2]);
  }

  Tensor make(const Statement& statement, Values& values) {
    const Tensor& a = pick(values, statement.a);
    const Tensor& b = pick(values, statement.b);
    const Tensor& w = parameter(statement.c);
    const auto same = [](const Tensor& t) {  // outside autocast, matrix products want one type
      return at::autocast::is_autocast_enabled(at::kCPU) ? t : t.to(torch::kFloat);
    };
    switch (statement.kind) {
      case Kind::tanh: return a.tanh();
      case Kind::sigmoid: return a.sigmoid();
      case Kind::gelu: return torch::gelu(a);
      case Kind::softmax: return torch::softmax(a, 1);
      case Kind::square: return a.square() * 0.5;
      case Kind::add: return a + b;
      case Kind::multiply: return a * b * 0.5;
      case Kind::matmul: return torch::mm(same(a), same(b)) * 0.4;
      case Kind::where: return torch::where(a > 0, a, b * 0.1);
      case Kind::clone: return a.clone();
      case Kind::select_largest: return a.index_select(0, std::get<1>(b.sum(1).topk(4)));
      case Kind::fill_own: return fill_own(a);
      case Kind::from_blob: return from_blob(a);
      case Kind::transpose: return a.t();
      case Kind::expand: return a.select(0, statement.b % 4).expand({4, 4});
      case Kind::slices: return torch::cat({a.slice(0, 2), a.slice(0, 0, 2)}) * a.slice(1, 1, 2);
      case Kind::reshape: return a.reshape({2, 8}).reshape({4, 4});
      case Kind::linear: return torch::linear(same(a), w, vectors_[1]);
      case Kind::scale: return a * w;
      case Kind::matmul_transposed: return torch::mm(same(a), w.t());
      case Kind::layer_norm: return torch::layer_norm(a.to(torch::kFloat), {4}, vectors_[0], vectors_[1]);
      case Kind::batch_norm: {
        // In training, the kernel updates the statistics without counting it in a version, which libtorch does not
        // detect either. So nothing else reads them.
        const bool training = statement.b % 3 != 0;
        const Tensor& mean = training ? buffers_[0] : buffers_[2];
        const Tensor variance = training ? buffers_[1] : buffers_[2].square() + 0.5;
        return torch::batch_norm(a.to(torch::kFloat), vectors_[0], vectors_[1], mean, variance, training, 0.2, 1e-5,
                                 false);
      }
      case Kind::read_buffer: return a * buffers_[2];
      case Kind::turn_buffer: return a * buffers_[3].t_();
      case Kind::no_grad: {
        const torch::NoGradGuard no_grad;
        return a.sin() * w;
      }
      case Kind::detach: return a.detach();
      case Kind::function: return Product::apply(a, b);
      case Kind::gradient: return gradient(a.to(torch::kFloat), values[0]);
      case Kind::dropout: return torch::dropout(a, 0.4, true);
      case Kind::random: return statement.b % 2 == 0 ? a * torch::rand_like(a) : a + torch::randn({4, 4});
      case Kind::own_random_nothing: return a + torch::empty_like(a).bernoulli_(0.0, own_);
      case Kind::random_of_block: return a * torch::rand({4, 4}, at::make_generator<at::CPUGeneratorImpl>(statement.b));
      default: return a * torch::empty_like(a).bernoulli_(0.5, own_);  // own_random
    }
  }

  static Tensor fill_own(const Tensor& a) {
    const Tensor sum = torch::zeros({4}, a.options());
    Tensor all = torch::empty({4, 4}, a.options());
    for (int64_t i = 0; i < 4; ++i) {
      sum.add_(a[i]);
      all[i] = a[i] * 0.5;
    }
    return all.add_(sum.tanh());
  }

  static Tensor from_blob(const Tensor& a) {
    std::vector<float> memory(4, 0.75f);
    const Tensor scale = torch::from_blob(memory.data(), {4});
    scale.add_(a.detach().select(0, 0));
    return a * scale.clone();
  }

  static Tensor gradient(const Tensor& value, const Tensor& of) {
    if (!value.requires_grad() || !of.requires_grad()) return value;
    const Tensor result = torch::autograd::grad({value.square().sum()}, {of}, {}, true, true, true)[0];
    return result.defined() ? result : value;
  }

  // In-place changes. With the fault of the statement, a block's second run leaves them out, and changes after the
  // block are not seen by versions.
  void change(const Statement& statement, Values& values) {
    Tensor& a = pick(values, statement.a);
    const torch::AutoGradMode grad(statement.kind < Kind::update_buffer);
    if (statement.kind == Kind::change_parameter) {
      Tensor w = parameter(statement.c);
      auto version = w.unsafeGetTensorImpl()->version_counter();
      const uint32_t before = version.current_version();
      w.mul_(-0.75);
      if (is_faulty(statement.kind)) version.set_version(before);
      return;
    }
    if (statement.kind == Kind::update_buffer) {
      buffers_[statement.b % 4 == 0 ? 1 : 2].mul_(0.5).add_(a.detach().to(torch::kFloat).mean(0));
      return;
    }
    if (statement.kind == Kind::assign_buffer) {
      buffers_[2] = buffers_[2] * 0.5 + a.detach().to(torch::kFloat).mean(0);
      return;
    }
    if ((a.is_leaf() && a.requires_grad()) || a.stride(0) == 0 || a.stride(1) == 0) return;
    auto version = a.unsafeGetTensorImpl()->version_counter();
    const uint32_t before = version.current_version();
    if (statement.kind == Kind::multiply_in_place) a.mul_(0.75);
    if (statement.kind == Kind::add_in_place) a.add_(pick(values, statement.b));
    if (statement.kind == Kind::tanh_in_place) a.tanh_();
    if (statement.kind == Kind::view_in_place) a.narrow(0, statement.b % 3, 2).mul_(0.5);
    if (is_faulty(statement.kind)) version.set_version(before);
  }

  void affect(const Statement& statement, Values& values, bool again) {
    Tensor& a = pick(values, statement.a);
    const int times = is_faulty(statement.kind) ? 2 : 1;
    switch (statement.kind) {
      case Kind::hook:  // the hook of a tensor from outside the block runs once if the block uses the tensor
        for (int i = 0; a.requires_grad() && i < times; ++i) add_hook(a);
        values.push_back(a.sin());
        break;
      case Kind::parameter_hook:
        for (int i = 0; i < times; ++i) add_hook(parameter(statement.c));
        values.push_back(a * parameter(statement.c));
        break;
      case Kind::clear_casts:
        // Side effects happen again with the block: here a careless program would get fresh casts in its next step.
        if (!again || !is_careless()) at::autocast::clear_cache();
        if (is_faulty(statement.kind)) leave_casts();
        break;
      case Kind::other_thread_draws:
        if (!again) std::thread([times] { torch::rand({times}); }).join();
        break;
      default: break;  // `close` without a block, and what happens after forward
    }
  }

  void leave_casts() const {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    for (const Tensor& parameter : parameters_) at::autocast::cached_cast(at::kBFloat16, parameter, at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }

  void add_hook(const Tensor& tensor) {
    tensor.register_hook([hooks = hooks_](const Tensor& gradient) {
      ++*hooks;
      return gradient * 0.75;
    });
  }

  void after_forward(Values& values) {
    const torch::NoGradGuard no_grad;
    for (const Statement& statement : program_) {
      const bool faulty = is_faulty(statement.kind);
      if (statement.kind == Kind::then_draw) {
        torch::rand({3});
        if (faulty) torch::manual_seed(1);
      }
      Tensor changed;
      if (statement.kind == Kind::then_change_parameter) changed = parameter(statement.c);
      if (statement.kind == Kind::then_change_value) changed = pick(values, statement.a);
      if (statement.kind == Kind::then_change_buffer) changed = buffers_[statement.b % buffers_.size()];
      if (!changed.defined() || changed.stride(0) == 0) continue;
      if (faulty)
        changed.data().mul_(0.5);  // no version counts it
      else
        changed.mul_(0.5);
    }
  }

  bool has(Kind kind) const {
    return std::any_of(program_.begin(), program_.end(), [&](const Statement& s) { return s.kind == kind; });
  }

  // The program leaves casts in the cache.
  bool is_careless() const {
    return std::any_of(program_.begin(), program_.end(),
                       [](const Statement& s) { return s.kind == Kind::autocast && s.b % 4 == 0; });
  }

  void backward(Values& values) {
    Tensor loss;
    const Tensor weights = torch::arange(16, torch::kFloat).view({4, 4}).cos();
    for (std::size_t i = values.size() > 4 ? values.size() - 4 : 0; i < values.size(); ++i) {
      const Tensor part = (values[i].to(torch::kFloat) * weights).sum();
      if (part.requires_grad()) loss = loss.defined() ? loss + part : part;
    }
    after_forward(values);
    if (!loss.defined()) return;
    std::optional<Autocast> region;
    if (has(Kind::backward_in_autocast)) region.emplace(true, false);
    const int passes = has(Kind::backward_twice) ? 2 : 1;
    for (int pass = 1; pass <= passes; ++pass) loss.backward({}, pass < passes);
    if (is_faulty(Kind::backward_twice) && passes == 2) parameters_[0].mutable_grad() = torch::ones({4, 4});
    if (is_faulty(Kind::autocast)) leave_casts();
    if (is_faulty(Kind::backward_in_autocast) && region) *hooks_ += 1;
  }

  void update() {
    const torch::NoGradGuard no_grad;
    for (auto* list : {&parameters_, &vectors_})
      for (Tensor& parameter : *list) {
        parameter.mul_(-0.9);
        if (parameter.grad().defined()) parameter.sub_(parameter.grad() * 0.01).clamp_(-2, 2);
        parameter.mutable_grad() = Tensor();
      }
  }

  const Program& program_;
  const bool checkpoint_;
  const Fault fault_;
  Values parameters_, vectors_;
  Values buffers_;  // mean and variance of batch norm, another, a matrix
  at::Generator own_ = at::make_generator<at::CPUGeneratorImpl>(17);
  std::shared_ptr<int> hooks_ = std::make_shared<int>(0);
};
}  // namespace

Outcome run(const Program& program, bool checkpoint, Fault fault) {
  Outcome outcome;
  try {
    Machine machine(program, checkpoint, fault);
    for (int step = 0; step < kSteps; ++step) machine.step(step, outcome);
  } catch (const std::exception& exception) {
    outcome.error = exception.what();
  }
  at::autocast::clear_cache();
  return outcome;
}

}  // namespace zr::test::recompute
