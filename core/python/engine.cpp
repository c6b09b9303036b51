// The TorchBind class Engine: zr::Engine for a model of Python, which the package lists as named tensors.
#include "zr/engine.hpp"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/boundary.hpp"
#include "python/program.hpp"
#include "zr/swap.hpp"

namespace zr::python {

namespace {
using Names = std::vector<std::string>;
using Tensors = std::vector<torch::Tensor>;

std::vector<std::pair<std::string, torch::Tensor>> named(const Names& names, const Tensors& tensors) {
  std::vector<std::pair<std::string, torch::Tensor>> result;
  result.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) result.emplace_back(names[i], tensors.at(i));
  return result;
}

TensorKind kind_of(const std::string& kind) {
  if (kind == "value") return TensorKind::value;
  if (kind == "gradient") return TensorKind::gradient;
  return TensorKind::state;
}

// The training thread, but generator().
struct EngineHolder : torch::CustomClassHolder {
  EngineHolder(const c10::intrusive_ptr<ProgramHolder>& program, const Names& names, const Tensors& parameters,
               const Names& buffer_names, const Tensors& buffers, const std::string& name)
      : tensors{named(names, parameters), named(buffer_names, buffers)}, engine(cross([&] {
          return std::make_unique<zr::Engine>(
              program->program, [this] { return tensors; }, name);
        })) {}
  ~EngineHolder() override = default;

  ModelTensors tensors;  // what the model has now
  std::unique_ptr<zr::Engine> engine;
};
using Self = c10::intrusive_ptr<EngineHolder>;

// Returns fn(engine). Throws UserError after close().
template <class Fn>
auto with(const Self& self, Fn&& fn) {
  return cross([&] {
    if (!self->engine) throw UserError("the engine was closed by engine.close(); create a new engine for the model");
    return fn(*self->engine);
  });
}
// A method of TorchBind that calls `fn` with the engine and the arguments.
template <class Result, class... Arguments>
auto method(Result (*fn)(zr::Engine&, Arguments...)) {
  return [fn](const Self& self, std::decay_t<Arguments>... arguments) -> Result {
    return with(self, [&](zr::Engine& engine) { return fn(engine, std::move(arguments)...); });
  };
}

using Step = std::tuple<int64_t, bool, double, double, double, double>;
Step last_step(zr::Engine& engine) {
  const StepResult step = engine.last_step();
  return {step.step, step.skipped, step.loss, step.gradient_norm, step.learning_rate, step.loss_scale};
}

using Report = std::tuple<std::string, Names, Names, Names, Names, Names>;
Report load(zr::Engine& engine, std::string dir, bool weights_only, bool strict, bool convert, bool fallback) {
  LoadReport report = engine.load(dir, {weights_only, strict, convert, fallback});
  return {std::move(report.folder),      std::move(report.missing), std::move(report.unexpected),
          std::move(report.other_shape), std::move(report.fresh),   std::move(report.dropped)};
}

using Parameter = std::tuple<std::string, std::vector<int64_t>, bool, int64_t>;
std::vector<Parameter> parameters(zr::Engine& engine) {
  std::vector<Parameter> list;
  for (ParameterInfo& info : engine.parameters())
    list.emplace_back(std::move(info.name), std::move(info.shape), info.trained, info.group);
  return list;
}

using Memory = std::tuple<std::string, std::string, int64_t, int64_t, int64_t>;
std::vector<Memory> memory(zr::Engine& engine) {
  std::vector<Memory> list;
  for (MemoryUse& use : engine.memory())
    list.emplace_back(std::move(use.tier), std::move(use.kind), use.planned, use.now, use.peak);
  return list;
}

using Group = std::tuple<Names, double, Names, Names, std::string>;
std::vector<Group> groups(zr::Engine& engine) {
  std::vector<Group> list;
  for (const GroupInfo& info : engine.groups()) {
    Names keys, values;
    for (const auto& [key, value] : info.values) {
      keys.push_back(key);
      values.push_back(value);
    }
    list.emplace_back(info.match, info.lr_scale, keys, values, info.use);
  }
  return list;
}

// `address`: double (*)(int64_t index, int32_t* failed), or 0.
void set_schedule(zr::Engine& engine, int64_t address) {
  using Function = double (*)(int64_t, int32_t*);
  if (address == 0) return engine.set_schedule({});
  engine.set_schedule([function = reinterpret_cast<Function>(address)](int64_t index) {
    int32_t failed = 0;
    const double rate = function(index, &failed);
    if (failed != 0) throw CallbackFailed();
    return rate;
  });
}

// `address`: int32_t (*)(const char* parameter, int64_t first), which reads the gradient from `mailbox`; or 0.
void edit_gradients(zr::Engine& engine, int64_t address, c10::intrusive_ptr<Mailbox> mailbox) {
  if (address == 0) return engine.edit_gradients({});
  const auto function = function_at<const char*, int64_t>(address);
  engine.edit_gradients([function, mailbox](const std::string& parameter, torch::Tensor gradient, int64_t first) {
    mailbox->arguments = {std::move(gradient)};
    function(parameter.c_str(), first);
    mailbox->arguments.clear();
  });
}

// `address`: int32_t (*)(const char* parameter), which puts the values into `mailbox`.
c10::intrusive_ptr<Scope> swap(zr::Engine& engine, int64_t address, c10::intrusive_ptr<Mailbox> mailbox) {
  const auto function = function_at<const char*>(address);
  return make_scope<Swap>(engine, Swap::Values([function, mailbox](const std::string& parameter) {
                            function(parameter.c_str());
                            return mailbox->take();
                          }));
}
}  // namespace

void define_engine(torch::Library& m) {
  using zr::Engine;
  m.class_<EngineHolder>("Engine")
      .def(torch::init<c10::intrusive_ptr<ProgramHolder>, Names, Tensors, Names, Tensors, std::string>())
      .def("set_tensors",
           [](const Self& self, const Names& names, const Tensors& tensors, const Names& buffer_names,
              const Tensors& buffers) {
             self->tensors = {named(names, tensors), named(buffer_names, buffers)};
           })
      .def("close",
           [](const Self& self, bool failed) {
             if (failed)
               while_unwinding([&] { self->engine.reset(); });
             else
               self->engine.reset();
             self->tensors = {};
           })
      .def("backward", method(+[](Engine& e, torch::Tensor loss, double weight) { e.backward(loss, weight); }))
      .def("step", method(+[](Engine& e) { return e.step(); }))
      .def("add_tokens", method(+[](Engine& e, int64_t n, std::string unit) { e.add_tokens(n, unit); }))
      .def("last_step", method(&last_step))
      .def("set_lr", method(+[](Engine& e, double rate) { e.set_lr(rate); }))
      .def("set_schedule", method(&set_schedule))
      .def("set_accumulation", method(+[](Engine& e, int64_t n) { e.set_accumulation(static_cast<int>(n)); }))
      .def("edit_gradients", method(&edit_gradients))
      .def("parameters", method(&parameters))
      .def("memory", method(&memory))
      .def("slots", method(+[](Engine& e) { return e.slots(); }))
      .def("groups", method(&groups))
      .def("release", method(+[](Engine& e, bool fp32) { fp32 ? e.release(torch::kFloat) : e.release(); }))
      .def("dtype", method(+[](Engine& e) { return static_cast<int64_t>(e.dtype()); }))
      .def("device", method(+[](Engine& e) { return e.device().str(); }))
      .def("rank", method(+[](Engine& e) { return int64_t{e.rank()}; }))
      .def("world", method(+[](Engine& e) { return int64_t{e.world()}; }))
      .def("accumulation", method(+[](Engine& e) { return int64_t{e.accumulation()}; }))
      .def("micro_batch", method(+[](Engine& e) { return e.micro_batch(); }))
      .def("steps", method(+[](Engine& e) { return e.steps(); }))
      .def("step_index", method(+[](Engine& e) { return e.step_index(); }))
      .def("micro_index", method(+[](Engine& e) { return e.micro_index(); }))
      .def("seed", method(+[](Engine& e) { return e.seed(); }))
      .def("generator", method(+[](Engine& e, int64_t key) { return e.generator(key); }))
      .def("samples", method(+[](Engine& e) { return e.samples(); }))
      .def("done", method(+[](Engine& e) { return e.done(); }))
      .def("validation_due", method(+[](Engine& e) { return e.validation_due(); }))
      .def("loss_scale", method(+[](Engine& e) { return e.loss_scale(); }))
      .def("get", method(+[](Engine& e, std::string parameter, std::string kind, std::string slot) {
             return e.get(parameter, kind_of(kind), slot);
           }))
      .def("set", method(+[](Engine& e, std::string parameter, std::string kind, torch::Tensor tensor,
                             std::string slot) { e.set(parameter, kind_of(kind), tensor, slot); }))
      .def("buffer", method(+[](Engine& e, std::string name) { return e.buffer(name); }))
      .def("set_buffer", method(+[](Engine& e, std::string name, torch::Tensor tensor) { e.set_buffer(name, tensor); }))
      .def("weights_hash", method(+[](Engine& e) { return e.weights_hash(); }))
      .def("finish", method(+[](Engine& e) { e.finish(); }))
      .def("save", method(+[](Engine& e, std::string dir) { return e.save(dir); }))
      .def("load", method(&load))
      .def("refresh", method(+[](Engine& e) { e.refresh(); }))
      .def("mean", method(+[](Engine& e, double value) { return e.mean(value); }))
      .def("sum", method(+[](Engine& e, torch::Tensor tensor) { return e.sum(tensor); }))
      .def("all_gather", method(+[](Engine& e, torch::Tensor tensor) { return e.all_gather(tensor); }))
      .def("broadcast", method(+[](Engine& e, torch::Tensor tensor, int64_t root) {
             return e.broadcast(tensor, static_cast<int>(root));
           }))
      .def("barrier", method(+[](Engine& e) { e.barrier(); }))
      .def("validation", method(+[](Engine& e, double loss) { e.validation(loss); }))
      .def("evaluation", method(+[](Engine& e) { return make_scope<Engine::Evaluation>(e); }))
      .def("swap", method(&swap));
}

}  // namespace zr::python
