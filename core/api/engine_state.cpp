#include "api/engine_state.hpp"

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdio>

#include "api/guarded.hpp"
#include "base/dtype.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "model/device_library.hpp"
#include "model/param_types.hpp"
#include "plan/parameter_list.hpp"

namespace zr {

namespace {
// The parameter dtype of the most recently created engine, for advice about errors that libtorch throws; null before.
std::atomic<const char*> last_dtype{nullptr};

// Of the engine that an exception has ended: a parameter whose shape the program has changed; "" if there is none.
std::string& reshaped_parameter() {
  static std::string text;
  return text;
}

std::string advice(const std::string& type, const std::string& text) {
  const char* dtype = last_dtype;
  if (!dtype || !type.starts_with("c10::")) return "";
  const auto has = [&](const char* words) { return text.find(words) != text.npos; };
  if (!reshaped_parameter().empty())
    return "the shape of a parameter was changed after the engine was made (set_data(), t_(), resize_()): " +
           reshaped_parameter() + "; keep its shape, or change it before the engine is made";
  if (has("modified by an inplace operation"))
    return "an in-place operator has changed a tensor of this shape between forward and engine.backward(): use the "
           "operator that returns a new tensor, or clone() before it";
  if (type == "c10::OutOfMemoryError")
    return "lower train.micro_batch, use zr::checkpoint in the model or more ranks, or set offload.optimizer = "
           "\"cpu\"; `zeroth plan` shows what the engine keeps on the device";
  if (has("Expected all tensors to be on the same device"))
    return "the engine keeps parameters on its device (job.device): move the inputs of the model there with "
           "x.to(engine.device())";
  if (has("device-side assert triggered"))
    return "an operator has rejected its input, such as an index outside of an embedding, and the process has lost the "
           "device";
  if (has("same dtype") || has("scalar type") || has("should be the same") || has("Found dtype"))
    return std::string("the engine keeps parameters in ") + dtype +
           " (train.dtype): cast the inputs of the model to that type with x.to(engine.dtype())";
  return "";
}

[[maybe_unused]] const bool kRegistered = [] {
  load_device_library = &host::model::load_device_library;
  return true;
}();

at::Device open_device(const host::engine::Setup& setup) {
  const at::Device device = host::model::open_device(setup.config.job().device, setup.control->local_rank());
  if (!device.is_cpu()) note_device_in_use();
  return device;
}

host::engine::Setup setup_of(const Program& program, const std::string& name) {
  host::engine::Setup setup = program.state()->setup();
  setup.engine = name;
  return setup;
}
}  // namespace

Engine::State::~State() {
  if (std::uncaught_exceptions() == 0 || !torch_model) return;
  const std::vector<std::string> reshaped = torch_model->reshaped_parameters();
  if (!reshaped.empty()) reshaped_parameter() = reshaped.front();
}

Engine::State::State(const Program& p, ProgramModule m, const std::string& engine_name,
                     std::unique_ptr<host::engine::RefreshState> before)
    : program(p),
      module(std::move(m)),
      name(engine_name),
      dtype(p.state()->setup().config.train().dtype),
      device(open_device(p.state()->setup())),
      torch_model(std::in_place, module.parameters(), module.buffers(), dtype, before != nullptr, device),
      session(std::in_place, setup_of(p, name), *torch_model, std::move(before)) {
  at::set_num_threads(session->threads());
  reshaped_parameter().clear();
  last_dtype = host::name_of(dtype).data();  // points to a string literal
  host::set_advice(&advice);
}

std::unique_ptr<Engine::State> Engine::State::make(const Program& program, const ProgramModule& module,
                                                   const std::string& name) {
  if (program.state()->prints_parameters()) {
    const Tensors parameters = module.parameters();
    const host::model::TorchModel queried(parameters, {}, program.state()->setup().config.train().dtype, false,
                                          parameters.empty() ? torch::kCPU : parameters[0].second.device());
    std::puts(host::plan::to_json(queried.parameters()).c_str());
    throw ExitRequest{std::fflush(stdout) == 0 ? 0 : exit_code::environment};
  }
  if (module.parameters().empty())
    host::fail_user(
        "zr::Engine: the model has no parameters; register its submodules and parameters in the "
        "constructor (register_module, register_parameter)");
  return host::guard_host_call("zr::Engine", [&] {
    host::model::check_param_types(module.parameters(), program.state()->setup().config, program.rank());
    auto state = std::make_unique<State>(program, module, name);
    state->finish_copies();
    return state;
  });
}

void Engine::State::finish_copies() {
  if (device.is_cpu()) return;
  const auto synchronize = [&] { host::model::synchronize_streams(device); };
  if (auto* const memory = torch_model->memory())
    memory->wait(synchronize);
  else
    synchronize();
}

torch::Tensor Engine::State::buffer(const std::string& name) {
  torch_model->check_buffers(module.buffers());
  std::vector<std::string> names;
  for (const auto& [buffer_name, tensor] : module.buffers()) {
    if (buffer_name == name && tensor.defined()) return tensor;
    names.push_back(buffer_name);
  }
  const std::string near = host::nearest(name, names);
  host::fail_user("the model has no buffer '" + host::printable(name) + "'" +
                  (near.empty() ? "" : "; did you mean '" + near + "'?"));
}

namespace {
// Calls a function of the program, and sets `running` to `name` meanwhile. Its exceptions pass through host code
// unchanged.
template <class Fn>
auto call_program(const char*& running, const char* name, Fn&& fn) {
  struct Scope {
    explicit Scope(const char*& where, const char* value) : running(where) { running = value; }
    ~Scope() { running = nullptr; }
    const char*& running;
  } const scope(running, name);
  try {
    return fn();
  } catch (...) {
    throw host::ProgramException{std::current_exception()};
  }
}
}  // namespace

void Engine::State::apply_schedule() {
  if (!program_settings.schedule) return session->update().set_schedule({});
  session->update().set_schedule([this](int64_t index) {
    return call_program(program_function, "engine.set_schedule()", [&] { return program_settings.schedule(index); });
  });
}

void Engine::State::apply_edit() {
  if (!program_settings.edit) return session->update().set_gradient_edit({});
  session->update().set_gradient_edit([this](uint32_t param, int64_t first, int64_t count, float* values) {
    const torch::NoGradGuard no_grad;
    const std::string& name = session->plan().input.parameters[param].name;
    call_program(program_function, "engine.edit_gradients()",
                 [&] { program_settings.edit(name, torch::from_blob(values, {count}, torch::kFloat), first); });
  });
}

}  // namespace zr
