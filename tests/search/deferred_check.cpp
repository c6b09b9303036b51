// Builds a random constructor twice, ordinarily and within zr::deferred, and compares all tensors.
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

#include "base/error.hpp"
#include "model/deferred.hpp"
#include "model/torch_model.hpp"
#include "search/deferred_language.hpp"

namespace deferred_search {

namespace {
using at::Tensor;
using zr::host::model::Construction;
using zr::host::model::Model;
using zr::host::model::TorchModel;
using Program = std::vector<Statement>;

constexpr int64_t kLargest = 4096;  // elements of a variable

// A tensor's shape, type and bytes.
struct Value {
  std::string shape;
  std::string bytes;
  bool operator==(const Value&) const = default;
};
std::string shape_of(const Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), tensor.numel() > 0 ? c10::str(" ", tensor.strides()) : "");
}
std::string bytes_of(const Tensor& tensor) {
  const Tensor dense = tensor.detach().contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}
std::string describe(const std::string& what, const std::string& one, const std::string& other) {
  return what + " is " + other + ", and was built as " + one;
}
std::string text_of(const Tensor& tensor) {
  const Tensor values = tensor.detach().to(at::kDouble).flatten().contiguous();
  std::string text;
  for (int64_t i = 0; i < std::min<int64_t>(values.numel(), 8); ++i)
    text += c10::str(i ? " " : "[", values.template const_data_ptr<double>()[i]);
  return text + (values.numel() > 8 ? " ...]" : "]");
}

// What an ordinary construction made.
struct Built {
  std::vector<Value> variables;
  std::vector<std::string> texts;
  std::vector<uint64_t> drawn;
  std::string state;
  std::vector<std::string> parameters;  // as fp32
};

std::string random_state() { return bytes_of(at::globalContext().defaultGenerator(at::kCPU).get_state()); }

void seed() {
  torch::manual_seed(42);
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
}

// Runs the statements until none throws; clears those that do.
Built build(Program& program, std::unique_ptr<Execution>& execution) {
  while (true) {
    seed();
    execution = std::make_unique<Execution>();
    std::vector<char> throws(program.size());
    for (std::size_t i = 0; i < program.size(); ++i) try {
        execution->run(program[i]);
      } catch (const c10::Error&) {
        throws[i] = 1;
      }
    if (std::count(throws.begin(), throws.end(), 1) == 0) break;
    for (std::size_t i = program.size(); i-- > 0;)
      if (throws[i]) program.erase(program.begin() + static_cast<std::ptrdiff_t>(i));
  }
  Built built;
  for (const Tensor& tensor : execution->tensors) {
    built.variables.push_back({shape_of(tensor), bytes_of(tensor)});
    built.texts.push_back(text_of(tensor));
  }
  built.drawn = execution->drawn;
  built.state = random_state();
  for (const auto& [name, tensor] : execution->parameters)
    if (tensor.is_floating_point()) built.parameters.push_back(bytes_of(tensor.to(at::kFloat)));
  return built;
}

// Whether an engine accepts the model; its message if not.
std::string accepts(const Execution& execution) {
  try {
    const TorchModel model(execution.parameters, execution.buffers, {});
    return "";
  } catch (const std::exception& error) {  // also libtorch's, of autograd
    return error.what();
  }
}

// Constructs the deferred model as the engine does. Returns the parameters, by name.
std::map<std::string, std::string> construct(TorchModel& model) {
  std::map<std::string, std::string> stored;
  int64_t largest = 0;
  for (const auto& parameter : model.parameters()) largest = std::max(largest, parameter.count);
  const Tensor staging = torch::empty({largest});
  const auto name_of = [&](uint32_t param) { return model.parameters()[param].name; };
  const auto store = [&](uint32_t param, const float* values) {
    stored[name_of(param)] = {reinterpret_cast<const char*>(values),
                              static_cast<std::size_t>(model.parameters()[param].count) * sizeof(float)};
  };
  const auto load = [&](uint32_t param, float* out) {
    std::memcpy(out, stored.at(name_of(param)).data(), stored.at(name_of(param)).size());
  };
  if (model.deferred() > 0)
    model.construct({staging.data_ptr<float>(), store, load, [](int64_t) {}, [](void*, int64_t) {}}, true);
  else
    for (uint32_t param = 0; param < model.parameters().size(); ++param) {
      model.read(param, staging.data_ptr<float>());
      store(param, staging.data_ptr<float>());
    }
  return stored;
}

std::optional<std::string> compare_parameters(const Built& built, const Execution& execution,
                                              const std::map<std::string, std::string>& stored) {
  const auto text = [](const std::string& bytes) {
    return text_of(torch::from_blob(const_cast<char*>(bytes.data()), {std::ssize(bytes) / 4}));
  };
  std::set<const c10::TensorImpl*> seen;  // a parameter may have several names
  for (std::size_t i = 0; i < execution.parameters.size(); ++i) {
    const auto& [name, tensor] = execution.parameters[i];
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second || tensor.numel() == 0) continue;
    const auto found = stored.find(name);
    if (found == stored.end()) return "parameter " + name + " has no values";
    if (found->second != built.parameters[i])
      return describe("parameter " + name, text(built.parameters[i]), text(found->second));
  }
  return std::nullopt;
}

std::optional<std::string> compare_variables(const Built& built, const Execution& execution) {
  for (std::size_t i = 0; i < execution.tensors.size(); ++i) try {
      const Tensor& tensor = execution.tensors[i];
      if (bytes_of(tensor) != built.variables[i].bytes)
        return describe("variable " + std::to_string(i), built.texts[i], text_of(tensor));
    } catch (const std::exception& error) {
      // A tensor that shares memory with a parameter or buffer that the engine has moved.
      const std::string message = error.what();
      if (message.find("was built by zr::deferred: a view created in a constructor") == message.npos &&
          message.find("before the zr::Engine moved the data") == message.npos)
        return "variable " + std::to_string(i) + " cannot be read: " + message;
    }
  return std::nullopt;
}

std::optional<std::string> check(Program program, Planted planted, Tally& tally) {
  const at::NoGradGuard no_grad;
  ++tally.programs;
  std::unique_ptr<Execution> ordinary;
  const Built built = build(program, ordinary);
  const std::string refusal = accepts(*ordinary);
  ordinary.reset();
  if (!refusal.empty()) return std::nullopt;
  ++tally.accepted;
  const auto reject = [&](const std::string& message) {
    ++tally.rejected[message];
    return std::nullopt;
  };
  seed();
  Execution deferred(planted);
  try {
    const Construction::RecordingScope scope;
    for (const Statement& statement : program) deferred.run(statement);
    deferred.flush();
    deferred.buffers.emplace_back("last", torch::zeros({1}));  // so that the engine constructs every program
  } catch (const zr::UserError& error) {
    return reject(error.what());
  } catch (const c10::Error& error) {
    return "the deferred constructor throws: " + std::string(error.what_without_backtrace());
  }
  if (deferred.drawn != built.drawn) return "the constructor draws other numbers";
  if (random_state() != built.state) return "the random state afterwards differs";
  if (deferred.tensors.size() != built.variables.size()) return "there are other tensors";
  for (std::size_t i = 0; i < deferred.tensors.size(); ++i)
    if (shape_of(deferred.tensors[i]) != built.variables[i].shape)
      return describe("variable " + std::to_string(i), built.variables[i].shape, shape_of(deferred.tensors[i]));
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  try {
    TorchModel model(deferred.parameters, deferred.buffers, {});
    const auto parameters = construct(model);
    if (random_state() != built.state) return "the engine changes the random state";
    const auto difference = compare_parameters(built, deferred, parameters);
    return difference ? difference : compare_variables(built, deferred);
  } catch (const zr::UserError& error) {
    return reject(error.what());
  } catch (const c10::Error& error) {
    return "the engine throws: " + std::string(error.what_without_backtrace());
  }
}
}  // namespace

Execution::Execution(Planted defect) : planted(defect) {
  {
    const zr::host::model::OperatorRecorder::Pause outside;
    ordinary = {torch::arange(6, at::kFloat).view({2, 3}), torch::full({4}, 0.5), torch::ones({17})};
  }
}
Execution::~Execution() = default;

at::Generator Execution::generator(uint32_t n) {
  if (generators.empty()) generators.push_back(at::make_generator<at::CPUGeneratorImpl>(7));
  return generators[n % generators.size()];
}

void Execution::push(const Tensor& tensor) {
  if (tensor.numel() <= kLargest) tensors.push_back(tensor);
}

void Execution::write(const std::function<void()>& op) {
  if (planted != Planted::late_metadata && planted != Planted::late_input) return op();
  delayed_ = op;
}

void Execution::flush() {
  if (delayed_) std::exchange(delayed_, nullptr)();
}

void Execution::run(const Statement& statement) {
  if (tensors.empty()) tensors.push_back(torch::ones({4, 5}));
  const Row& row = rows()[statement.kind];
  const bool outside = row.name == "change_outside";
  if (!row.is_change || outside != (planted == Planted::late_input)) flush();
  const auto before = std::exchange(delayed_, nullptr);
  row.run(*this, statement);
  if (before) before();
}

const Rows& rows() {
  static const Rows all = [] {
    Rows made;
    add_factories(made);
    add_operators(made);
    add_views(made);
    add_random(made);
    add_registrations(made);
    return made;
  }();
  return all;
}

zr::test::ProgramLanguage<Statement> language(Planted planted, Tally& tally) {
  std::vector<std::size_t> kinds;
  for (std::size_t kind = 0; kind < rows().size(); ++kind) kinds.insert(kinds.end(), rows()[kind].weight, kind);
  const auto kind_of = [](const std::string& name) {
    const auto named = [&](const Row& row) { return row.name == name; };
    return static_cast<std::size_t>(std::find_if(rows().begin(), rows().end(), named) - rows().begin());
  };
  const std::size_t reads = kind_of("add_outside_"), changes = kind_of("change_outside");
  zr::test::ProgramLanguage<Statement> made;
  made.name = "deferred construction";
  made.generate = [kinds, reads, changes](zr::test::SearchRandom& random) {
    Program program(4 + random.below(16));
    const auto draw = [&] { return static_cast<uint32_t>(random.below(1000)); };
    for (Statement& statement : program) {
      statement.kind = random.pick(kinds);
      statement.a = draw();
      statement.b = draw();
      statement.c = draw();
      statement.d = draw();
    }
    // Rare otherwise: an ordinary tensor changes right after the constructor has read it.
    for (std::size_t i = 1; i < program.size(); ++i)
      if (program[i - 1].kind == reads && random.below(2) == 0) {
        program[i].kind = changes;
        program[i].a = program[i - 1].b;
      }
    return program;
  };
  made.fault = [planted, &tally](const Program& program) { return check(program, planted, tally); };
  made.print = [](const Statement& s) {
    return rows()[s.kind].name + " " + std::to_string(s.a) + " " + std::to_string(s.b) + " " + std::to_string(s.c) +
           " " + std::to_string(s.d);
  };
  return made;
}

}  // namespace deferred_search
