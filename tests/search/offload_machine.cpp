// Executes the statements.
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "model/process_setup.hpp"
#include "model/saved_tensor_offload.hpp"
#include "search/offload_language.hpp"

namespace zr::test::offload {

namespace {
using host::model::SavedHooks;
using host::model::SavedTensorOffload;
using host::model::SavedTensorScope;
using torch::Tensor;
using Values = std::vector<Tensor>;
using What = Fault::What;

// Adds three quantities to results: name, type, bytes.
void add(Outcome& outcome, const std::string& name, const Tensor& tensor) {
  if (!tensor.defined()) return outcome.results.emplace_back(name, "undefined"), void();
  const Tensor dense = tensor.detach().contiguous();
  outcome.results.emplace_back(name, c10::toString(dense.scalar_type()) +
                                         std::string(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()));
}

// Every result as a matrix of 4 x 4, real and not larger than 2.
Tensor fit(const Tensor& result) {
  Tensor t = result.is_complex() ? torch::view_as_real(result).sum(-1) : result;
  if (t.dim() == 2 && t.size(0) == 4 && t.size(1) == 4) return t;
  if (t.numel() >= 16) return t.reshape({-1}).slice(0, 0, 16).view({4, 4});
  return t.sum().expand({4, 4});
}

// A store in memory. Records remember the operator that was running when they came.
class Store {
 public:
  explicit Store(Fault fault) : fault_(fault) {}
  host::model::Model::OffloadCallbacks callbacks() {
    return {1, [this](const void* data, int64_t n) { return put(data, static_cast<std::size_t>(n)); },
            [this](uint64_t record, void* to) { get(record, to); }, [](const std::vector<uint64_t>&) {},
            [this](uint64_t record) { records_.erase(record); }};
  }
  void running(uint32_t kind) { kind_ = kind; }
  bool empty() const { return records_.empty(); }
  std::vector<uint32_t> restored() const { return {restored_.begin(), restored_.end()}; }

 private:
  struct Record {
    std::string bytes;
    uint32_t kind;
  };
  uint64_t put(const void* data, std::size_t n) {
    records_[++count_] = {std::string(static_cast<const char*>(data), n), kind_};
    return count_;
  }
  void get(uint64_t number, void* to) {
    Record& record = records_.at(number);
    std::string bytes = record.bytes;
    // Moves the elements, since all bits of floating-point numbers, but few of indices, are valid.
    if (fault_.what == What::record && fault_.kind == record.kind) {
      if (bytes.size() >= 16)
        std::rotate(bytes.begin(), bytes.begin() + 8, bytes.end());
      else
        std::fill(bytes.begin(), bytes.end(), '\0');
    }
    restored_.insert(record.kind);
    std::memcpy(to, bytes.data(), bytes.size());
  }

  const Fault fault_;
  uint32_t kind_ = 0;
  uint64_t count_ = 0;
  std::map<uint64_t, Record> records_;
  std::set<uint32_t> restored_;
};

// Hooks of the offload, whose tensors it gives back wrongly.
class Wrong final : public SavedHooks {
 public:
  Wrong(std::unique_ptr<SavedHooks> hooks, What what) : hooks_(std::move(hooks)), what_(what) {}
  void call_pack_hook(const Tensor& tensor) override { hooks_->call_pack_hook(tensor); }
  Tensor call_unpack_hook() override {
    const Tensor tensor = hooks_->call_unpack_hook();
    if (tensor.dim() != 2 || !tensor.is_floating_point()) return tensor;
    if (what_ == What::dtype) return tensor.to(torch::kDouble);
    return tensor.size(0) == tensor.size(1) ? tensor.t() : tensor;
  }

 private:
  std::unique_ptr<SavedHooks> hooks_;
  const What what_;
};

class Machine {
 public:
  Machine(const Program& program, Outcome& outcome, Store* store, Fault fault)
      : program_(program), outcome_(outcome), store_(store), fault_(fault) {
    torch::manual_seed(23);
    for (int i = 0; i < 2; ++i) parameters_.push_back(torch::randn({4, 4}).mul_(0.5).requires_grad_());
  }

  void run() {
    const Tensor x = torch::randn({4, 4}).requires_grad_();
    const Tensor loss = forward(x);
    if (loss.defined()) loss.backward();
    add(outcome_, "gradient of the input", x.grad());
    for (const Tensor& parameter : parameters_) add(outcome_, "gradient of a parameter", parameter.grad());
    add(outcome_, "generator", at::globalContext().defaultGenerator(at::kCPU).get_state());
  }

 private:
  Tensor forward(const Tensor& x) {
    Values values{x, x * 1.25};
    for (const Statement& statement : program_) {
      const uint32_t kind = statement.kind % static_cast<uint32_t>(operators().size());
      if (store_) store_->running(kind);
      const Tensor a = values[statement.a % values.size()], b = values[statement.b % values.size()];
      auto version = a.unsafeGetTensorImpl()->version_counter();
      const uint32_t before = version.current_version();
      values.push_back(fit(operators()[kind].call({a, b, parameters_[statement.c % 2], statement.c})));
      if (store_ && fault_.what == What::version) version.set_version(before);
    }
    if (store_) store_->running(static_cast<uint32_t>(operators().size()));
    Tensor loss;
    const Tensor weights = torch::arange(16, torch::kFloat).view({4, 4}).cos();
    for (std::size_t i = 2; i < values.size(); ++i) {
      add(outcome_, "value " + std::to_string(i), values[i]);
      const Tensor part = (values[i].to(torch::kFloat) * weights).sum();
      if (part.requires_grad()) loss = loss.defined() ? loss + part : part;
    }
    return loss;
  }

  const Program& program_;
  Outcome& outcome_;
  Store* const store_;
  const Fault fault_;
  Values parameters_;
};

void run_offloaded(const Program& program, Fault fault, Outcome& outcome) {
  host::model::ProcessSetup::count_cpu_memory();
  Store store(fault);
  const SavedTensorOffload offload(store.callbacks(), {});
  std::vector<std::unique_ptr<SavedHooks>> spare;
  std::optional<SavedTensorScope> wrong;
  if (fault.what == What::strides || fault.what == What::dtype) {
    for (int i = 0; i < 1000; ++i) spare.push_back(SavedTensorScope::hooks());
    wrong.emplace([&]() -> std::unique_ptr<SavedHooks> {
      auto hooks = std::move(spare.back());
      spare.pop_back();
      return std::make_unique<Wrong>(std::move(hooks), fault.what);
    });
  }
  try {
    Machine(program, outcome, &store, fault).run();
  } catch (const std::exception& exception) {
    outcome.error = exception.what();
  }
  outcome.stored = store.restored();
  if (!store.empty() && outcome.error.empty()) outcome.error = "records are left in the store";
}
}  // namespace

Outcome run(const Program& program, bool offloaded, Fault fault) {
  Outcome outcome;
  if (offloaded) {
    run_offloaded(program, fault, outcome);
    return outcome;
  }
  try {
    Machine(program, outcome, nullptr, fault).run();
  } catch (const std::exception& exception) {
    outcome.error = exception.what();
  }
  return outcome;
}

Program generate(SearchRandom& random) {
  Program program;
  const std::size_t length = 2 + random.below(7);
  while (program.size() < length) {
    const auto number = [&] { return static_cast<uint32_t>(random.below(60)); };
    program.push_back({static_cast<uint32_t>(random.below(operators().size())), number(), number(), number()});
  }
  return program;
}

std::string print(const Statement& statement) {
  std::string text = operators()[statement.kind].name;
  for (const uint32_t number : {statement.a, statement.b, statement.c}) text += " " + std::to_string(number);
  return text;
}

}  // namespace zr::test::offload
