#include "api/engine_state.hpp"

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>

#include "api/guarded.hpp"
#include "base/dtype.hpp"
#include "base/log.hpp"
#include "model/device_library.hpp"
#include "model/kept_tensors.hpp"
#include "model/param_types.hpp"
#include "model/process_setup.hpp"
#include "plan/parameter_list.hpp"
#include "zr/mutex.hpp"

namespace zr {

namespace {
// The parameter dtype of the most recently created engine, for advice about errors that libtorch throws; null before.
std::atomic<const char*> last_dtype{nullptr};
// Which buffers of the engines that existed then are not of that dtype. An error is reported after its engine has gone.
struct KeptBuffers {
  Mutex mutex;
  std::string text ZR_GUARDED_BY(mutex);
  static KeptBuffers& last() {
    static auto* buffers = new KeptBuffers;  // errors are reported after statics are destroyed, too
    return *buffers;
  }
  static void set(std::string text) {
    const MutexLock lock(last().mutex);
    last().text = std::move(text);
  }
  static std::string get() {
    const MutexLock lock(last().mutex);
    return last().text;
  }
};

// The engine that exists now (the one made last), and what the last one that an exception has ended held. Training
// thread; the thread that reports an exception reads them when no engine is in use.
struct EngineMemory {
  const std::optional<host::engine::Session>* session = nullptr;
  std::optional<host::engine::MemoryInUse> before_end;
};
EngineMemory& engine_memory() {
  static auto* memory = new EngineMemory;  // never destroyed: exceptions may be reported after statics are destroyed
  return *memory;
}

// The bytes of the failed allocation of host memory that libtorch reports; 0 if the text has none.
int64_t requested_bytes(const std::string& text) {
  constexpr std::string_view kBefore = "you tried to allocate ";
  const auto at = text.find(kBefore);
  return at == text.npos ? 0 : std::strtoll(text.c_str() + at + kBefore.size(), nullptr, 10);
}

std::string memory_advice(const std::string& text) {
  const EngineMemory& memory = engine_memory();
  const bool exists = memory.session && *memory.session;
  if (!exists && !memory.before_end) return "";
  return (exists ? (*memory.session)->memory_in_use() : *memory.before_end).text(requested_bytes(text));
}

// Of the engine that an exception has ended: a parameter whose shape the program has changed; "": none.
std::string& reshaped_parameter() {
  static auto* text = new std::string;  // never destroyed, as engine_memory()
  return *text;
}

std::string advice(const std::string& type, const std::string& text) {
  const auto has = [&](const char* words) { return text.find(words) != text.npos; };
  if (type == "c10::OutOfMemoryError" || type == "std::bad_alloc" || has("can't allocate memory"))
    return memory_advice(text);
  const char* dtype = last_dtype;
  if (!dtype || !type.starts_with("c10::")) return "";
  if (!reshaped_parameter().empty())
    return "the shape of a parameter was changed after the engine was made (set_data(), t_(), resize_()): " +
           reshaped_parameter() + "; keep its shape, or change it before the engine is made";
  if (has("modified by an inplace operation"))
    return "an in-place operator has changed a tensor of this shape between forward and engine.backward(): use the "
           "operator that returns a new tensor, or clone() before it; or it is a parameter that engine.step(), set(), "
           "load() or zr::Swap has changed since forward: call forward again";
  if (has("A view was created in no_grad mode"))
    return "the model keeps a view of a parameter that was made with gradients disabled, and the engine has changed "
           "the parameter since: make the view in forward(), or with gradients enabled";
  if (has("Expected all tensors to be on the same device"))
    return "the engine keeps parameters on its device (job.device): move the inputs of the model there with "
           "x.to(engine.device())";
  if (has("device-side assert triggered"))
    return "an operator has rejected its input, such as an index outside of an embedding, and the process has lost the "
           "device";
  if (!host::model::KeptTensors::is_type_error(text)) return "";
  const std::string kept = KeptBuffers::get();
  return std::string("the engine keeps parameters in ") + dtype +
         " (train.dtype): cast the inputs of the model to that type with x.to(engine.dtype())" +
         (kept.empty() ? "" : "; " + kept);
}

[[maybe_unused]] const bool kRegistered = [] {
  load_device_library = &host::model::load_device_library;
  return true;
}();

at::Device open_device(const host::job::Setup& setup) {
  const at::Device device = host::model::open_device(setup.config.job().device, setup.control->local_rank());
  if (!device.is_cpu()) note_device_in_use();
  return device;
}

host::model::TorchModelOptions options_of(const Program& program, at::Device device, bool reloads) {
  const host::config::TrainConfig& train = program.state()->setup().config.train();
  return {train.dtype, train.cast_buffers, device, reloads};
}

host::job::Setup setup_of(const Program& program, const std::string& name) {
  host::job::Setup setup = program.state()->setup();
  setup.engine = name;
  return setup;
}
}  // namespace

Engine::State::State(const Program& p, ProgramModulePtr m, const std::string& engine_name,
                     std::unique_ptr<host::engine::RefreshState> before)
    : program(p),
      module(std::move(m)),
      name(engine_name),
      dtype(p.state()->setup().config.train().dtype),
      device(open_device(p.state()->setup())),
      torch_model(std::in_place, module->parameters(), module->buffers(), options_of(p, device, before != nullptr)),
      session(std::in_place, setup_of(p, name), *torch_model, std::move(before)) {
  host::model::ProcessSetup::use_threads(session->threads());
  reshaped_parameter().clear();
  last_dtype = host::name_of(dtype).data();  // points to a string literal
  KeptBuffers::set(host::model::KeptTensors::describe_all());
  host::set_advice(&advice);
  engine_memory() = {&session, std::nullopt};
}

Engine::State::~State() {
  const bool unwinds = std::uncaught_exceptions() > 0;
  if (unwinds && torch_model)
    if (const std::vector<std::string> reshaped = torch_model->reshaped_parameters(); !reshaped.empty())
      reshaped_parameter() = reshaped.front();
  EngineMemory& memory = engine_memory();
  if (memory.session != &session) return;
  memory.session = nullptr;
  if (!unwinds || !session) return;
  try {
    memory.before_end = session->memory_in_use();
  } catch (const std::exception&) {  // no memory for the text: the advice has none
  }
}

std::unique_ptr<Engine::State> Engine::State::make(const Program& program, const ProgramModulePtr& module,
                                                   const std::string& name) {
  if (program.state()->prints_parameters()) {
    const Tensors parameters = as_thrown([&] { return module->parameters(); });
    const at::Device on = parameters.empty() ? torch::kCPU : parameters[0].second.device();
    const host::model::TorchModel queried(parameters, {}, options_of(program, on, false));
    std::puts(host::plan::to_json(queried.parameters()).c_str());
    throw ExitRequest{std::fflush(stdout) == 0 ? 0 : exit_code::environment};
  }
  if (as_thrown([&] { return module->parameters().empty(); }))
    host::fail_user(
        "zr::Engine: the model has no parameters; register its submodules and parameters in the "
        "constructor (register_module, register_parameter)");
  return as_thrown([&] {
    return host::guard_host_call("zr::Engine", [&] {
      host::model::check_param_types(module->parameters(), program.state()->setup().config, program.rank());
      host::model::check_buffer_types(module->buffers(), program.state()->setup().config, program.rank());
      auto state = std::make_unique<State>(program, module, name);
      state->finish_copies();
      return state;
    });
  });
}

void Engine::State::end_by_exit(int exit_code) {
  left_to_exit = !call.empty() || program_function;
  if (left_to_exit || !session) return;
  ended_by_exit = true;
  try {
    if (exit_code != 0) session->record_failure();
    session.reset();
    torch_model.reset();
  } catch (const std::exception& error) {
    host::log(ZR_LOG_ERROR, std::string("the engine could not end when the process exits: ") + error.what());
  }
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
  torch_model->check_buffers(module->buffers());
  std::vector<std::string> names;
  for (const auto& [buffer_name, tensor] : module->buffers()) {
    if (buffer_name == name && tensor.defined()) return tensor;
    names.push_back(buffer_name);
  }
  const std::string near = host::nearest(name, names);
  host::fail_user("the model has no buffer '" + host::printable(name) + "'" +
                  (near.empty() ? "" : "; did you mean '" + near + "'?"));
}

void Engine::State::apply_schedule() {
  if (!program_settings.schedule) return session->update().set_schedule({});
  session->update().set_schedule([this](int64_t index) {
    return call_program("engine.set_schedule()", [&] { return program_settings.schedule(index); });
  });
}

void Engine::State::apply_edit() {
  if (!program_settings.edit) return session->update().set_gradient_edit({});
  session->update().set_gradient_edit([this](uint32_t param, int64_t first, int64_t count, float* values) {
    const torch::NoGradGuard no_grad;
    const std::string& name = session->plan().input.parameters[param].name;
    call_program("engine.edit_gradients()",
                 [&] { program_settings.edit(name, torch::from_blob(values, {count}, torch::kFloat), first); });
  });
}

}  // namespace zr
