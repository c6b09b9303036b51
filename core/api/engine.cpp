#include "zr/engine.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cctype>

#include "api/engine_state.hpp"
#include "api/state_dict.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "model/device_copies.hpp"
#include "model/param_types.hpp"
#include "model/process_setup.hpp"
#include "model/torch_dtype.hpp"

namespace zr {

Engine::Handle::Handle() = default;
Engine::Handle::Handle(std::unique_ptr<State> state) : state_(std::move(state)) {}
Engine::Handle::~Handle() {
  if (state_ && state_->must_leak()) static_cast<void>(state_.release());
}
Engine::Handle& Engine::Handle::operator=(Handle&&) noexcept = default;
std::unique_ptr<Engine::State> Engine::Handle::take() { return std::move(state_); }
Engine::State* Engine::Handle::operator->() const {
  if (!state_)
    host::fail_user(
        "an earlier engine.refresh() failed, so this engine is unusable; create a new engine and load the checkpoint "
        "that the error of engine.refresh() names");
  return state_.get();
}

Engine::Engine(const std::string& toml, torch::nn::Module& model) : Engine(Program(toml), model) {}

Engine::Engine(const Program& program, torch::nn::Module& model, const std::string& name)
    : state_(State::make(program, program_module(model), name)) {}

Engine::Engine(const Program& program, torch::jit::Module& model, const std::string& name) {
  host::model::ProcessSetup::run_torchscript_as_written();
  state_ = State::make(program, program_module(model), name);
}

Engine::Engine(const Program& program, std::function<ModelTensors()> list, const std::string& name)
    : state_(State::make(program, program_module(std::move(list)), name)) {}

Engine::~Engine() = default;

void Engine::refresh() {
  state_->session_for("refresh");
  const auto [parameters, buffers] =
      State::as_thrown([&] { return std::pair(state_->module->parameters(), state_->module->buffers()); });
  const Program program = state_->program;
  const ProgramModulePtr module = state_->module;
  const std::string name = state_->name;
  State::ProgramSettings program_settings = state_->program_settings;
  auto refresh_state = std::make_unique<host::engine::RefreshState>();
  std::string folder;
  // A new session broadcasts rank 0's buffers, so this rank's own values of existing buffers are saved and restored.
  std::vector<std::pair<torch::Tensor, torch::Tensor>> kept_buffers;
  {
    State& before = *state_;
    const State::Call call(before, "refresh");
    call.not_in_evaluation();
    call.not_in_swap();
    before.session->comm().barrier(call.text().c_str());  // a rank in another call ends the job with the names of both
    host::engine::ParameterChange change;
    const auto find_changes = [&](host::engine::ParameterChange& parameter_changes) {
      if (before.torch_model->has_buffers()) before.torch_model->adopt_buffers(buffers);
      parameter_changes = parameter_change(*before.torch_model, parameters, buffers);
      host::model::check_param_types(parameters, before.session->config(), before.session->rank());
      std::vector<host::plan::Parameter> list = before.torch_model->list_parameters(parameters, buffers);
      if (!parameter_changes.any) return list;
      for (const auto& [buffer, tensor] : buffers)
        if (before.torch_model->has_buffer(tensor)) kept_buffers.emplace_back(tensor, tensor.detach().clone());
      return list;
    };
    if (!before.session->refresh().compare_changes(find_changes, change)) return;
    *refresh_state = before.session->hand_over(std::move(change));
    before.torch_model->leave_for_reload();
  }
  try {
    state_.take().reset();
    folder = refresh_state->folder;
    auto next =
        State::as_thrown([&] { return std::make_unique<State>(program, module, name, std::move(refresh_state)); });
    const torch::NoGradGuard no_grad;
    for (auto& [buffer, values] : kept_buffers) buffer.copy_(values);
    next->program_settings = std::move(program_settings);
    next->apply_schedule();
    next->apply_edit();
    if (next->program_settings.accumulation > 0) next->session->set_accumulation(next->program_settings.accumulation);
    next->finish_copies();
    state_ = std::move(next);
  } catch (...) {
    if (program.rank() == 0)
      host::log(ZR_LOG_ERROR, "engine.refresh() failed; the checkpoint " + folder + " has the state before the call");
    throw;
  }
}

namespace {
// libtorch's message names neither the tensor nor the call.
void fail_if_freed(const torch::Tensor& loss, const c10::Error& error) {
  if (std::string_view(error.what()).find("backward through the graph a second time") == std::string_view::npos) return;
  const auto& node = loss.grad_fn();
  host::fail_user("engine.backward(loss): the graph of the loss" + (node ? " (" + node->name() + ")" : std::string()) +
                  ", or a part of it, was freed by an earlier backward; call the model's forward again for each "
                  "engine.backward(), and detach() tensors that are kept from an earlier step; to train with several "
                  "losses of one forward, add them up and call engine.backward() once");
}
}  // namespace

void Engine::backward(const torch::Tensor& loss, double weight) {
  const State::Call call(*state_, "backward");
  host::engine::Session& session = *state_->session;
  call.not_in_evaluation();
  call.not_in_swap();
  if (!loss.defined())
    host::fail_user("engine.backward(loss): the loss is an undefined tensor; pass the result of the forward pass");
  if (loss.numel() != 1)
    host::fail_user("engine.backward(loss): the loss has " + std::to_string(loss.numel()) +
                    " elements, but must have exactly one; reduce it, for example with loss.mean()");
  State::as_thrown([&] {
    state_->torch_model->check_trained(state_->module->parameters());
    if (!session.checkpointer().dir().empty())  // a checkpoint may be due in step()
      state_->torch_model->check_buffers(state_->module->buffers());
  });
  if (!loss.requires_grad())
    host::fail_user(
        "engine.backward(loss): the loss has no autograd graph (requires_grad is false), so no parameter would get a "
        "gradient; compute it from the model's parameters, without detach(), torch::NoGradGuard or "
        "zr::Engine::Evaluation around the forward pass");
  host::DeviceMemory* const device = state_->torch_model->memory();
  host::engine::Loss value = device && !loss.is_cpu()
                                 ? host::engine::Loss(host::model::value_on_host(loss.detach(), *device))
                                 : host::engine::Loss(loss.item<double>());
  State::with_program_functions(call, [&] { session.begin_backward(std::move(value), weight); });
  try {
    // A loss of weight 0 is not scaled: its gradients are dropped on arrival, even if they are NaN.
    const double factor = weight == 0 ? 1 : weight * session.progress().loss_scale().value();
    // The loss scale exceeds the range of fp16, so an fp16 loss is upcast first.
    const bool upcasts = factor != 1 && loss.scalar_type() == torch::kHalf;
    const torch::Tensor root = upcasts ? loss.to(torch::kFloat) : loss;
    torch::autograd::backward({factor == 1 ? root : root * factor}, {});
  } catch (const c10::Error& error) {
    session.fail_backward();
    fail_if_freed(loss, error);
    throw;
  } catch (...) {
    session.fail_backward();
    throw;
  }
  session.end_backward();
}

bool Engine::step() {
  if (!make_step()) return false;
  if (state_->program_settings.callbacks.empty()) return true;
  const StepResult result = last_step();
  const auto callbacks = state_->program_settings.callbacks;  // a callback may refresh the engine or add callbacks
  for (const auto& callback : callbacks) callback(result);
  return true;
}

bool Engine::make_step() {
  const State::Call call(*state_, "step");
  call.not_in_evaluation();
  call.not_in_swap();
  if (state_->session->progress().at_boundary())
    State::as_thrown([&] {
      if (state_->session->checkpointer().dir().empty())
        state_->adopt_buffers();
      else
        state_->torch_model->check_buffers(state_->module->buffers());
    });
  return State::with_program_functions(call, [&] {
    if (state_->session->progress().at_boundary()) state_->torch_model->check_bindings();
    return state_->session->step();
  });
}
bool Engine::done() const { return state_->session_for("done").progress().done(); }

std::string Engine::save(const std::string& dir) {
  return state_->collective("save", quoted(dir), [&](host::engine::Session& session, const State::Call& call) {
    call.not_in_swap();
    state_->torch_model->check_bindings();
    state_->torch_model->check_trained(state_->module->parameters());
    state_->torch_model->check_buffers(state_->module->buffers());
    if (dir.empty()) host::fail_user("engine.save(dir): the folder name is empty; name a folder for checkpoints");
    return session.checkpointer().save(dir, session.config().checkpoint().keep, session.config().checkpoint().async);
  });
}

LoadReport Engine::load(const std::string& dir, const LoadOptions& how) {
  return state_->collective(
      "load", quoted(dir), [&](host::engine::Session& session, const State::Call& call) -> LoadReport {
        if (!session.swap().abandoned() || !how.strict) call.not_in_swap();  // a load of all parameters restores them
        if (dir.empty())
          host::fail_user("engine.load(dir): the folder name is empty; name a checkpoint or a folder of checkpoints");
        state_->adopt_buffers();
        StateDictFile converted(session, dir);
        host::engine::CheckpointLoadOptions options{how.weights_only, how.strict, how.convert, how.fallback};
        if (converted.path() != dir) {
          options.name = dir;
          options.provide_values = [&](const std::vector<std::string>& names) { converted.provide(names); };
        }
        host::engine::CheckpointLoadReport report = session.checkpointer().load(converted.path(), options);
        state_->finish_copies();
        if (session.swap().abandoned()) session.swap().forget();
        if (state_->evaluations > 0) state_->random = host::model::RandomState::current();
        return {report.folder,
                std::move(report.missing),
                std::move(report.unexpected),
                std::move(report.other_shape),
                std::move(report.fresh),
                std::move(report.dropped)};
      });
}

void Engine::release() {
  state_->session_for("release");
  release(dtype());
}
void Engine::release(torch::ScalarType dtype) {
  state_->collective("release", "", [&](host::engine::Session& session, const State::Call& call) {
    call.not_in_evaluation();
    call.not_in_swap();
    if (dtype != torch::kFloat && dtype != host::model::torch_type(state_->dtype))
      host::fail_user("engine.release(dtype): dtype is " + std::string(c10::toString(dtype)) + ", but must be " +
                      (state_->dtype == ZR_F32 ? "" : "torch::kFloat or ") + "engine.dtype(), which is " +
                      c10::toString(host::model::torch_type(state_->dtype)));
    state_->torch_model->check_bindings();
    state_->adopt_buffers();
    session.return_weights(dtype == torch::kFloat ? zr_dtype{ZR_F32} : state_->dtype);
  });
  state_->session.reset();
  state_->torch_model.reset();
}

void Engine::add_tokens(int64_t tokens, const std::string& unit) {
  host::engine::Session& session = state_->session_for("add_tokens");
  if (tokens < 0)
    host::fail_user("engine.add_tokens(" + std::to_string(tokens) + "): the number of tokens must not be negative");
  const auto fits = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-'; };
  if (unit.empty() || unit.size() > 32 || !std::all_of(unit.begin(), unit.end(), fits))
    host::fail_user("engine.add_tokens(tokens, unit): '" + host::printable(unit) +
                    "' must be a word of at most 32 letters, digits, '_' and '-', such as images");
  session.progress().add_tokens(tokens, unit);
}
int Engine::rank() const { return state_->session_for("rank").rank(); }
int Engine::world() const { return state_->session_for("world").world(); }
int Engine::accumulation() const { return state_->session_for("accumulation").progress().accumulation(); }
int64_t Engine::micro_batch() const { return state_->session_for("micro_batch").config().train().micro_batch; }
int64_t Engine::steps() const { return state_->session_for("steps").config().train().steps; }
int64_t Engine::step_index() const { return state_->session_for("step_index").progress().step(); }
int64_t Engine::micro_index() const { return state_->session_for("micro_index").micro_index(); }
int64_t Engine::seed() const { return state_->session_for("seed").config().train().seed; }
at::Generator Engine::generator(int64_t key) const {
  return at::make_generator<at::CPUGeneratorImpl>(state_->session_for("generator").generator_seed(key));
}
int64_t Engine::samples() const { return state_->session_for("samples").progress().samples(); }
double Engine::last_loss() const { return state_->session_for("last_loss").progress().loss(); }
double Engine::loss_scale() const { return state_->session_for("loss_scale").progress().loss_scale().value(); }
double Engine::last_grad_norm() const { return state_->session_for("last_grad_norm").progress().grad_norm(); }
torch::ScalarType Engine::dtype() const {
  state_->session_for("dtype");
  return host::model::torch_type(state_->dtype);
}
torch::Device Engine::device() const {
  state_->session_for("device");
  return state_->device;
}
void Engine::finish() {
  state_->collective("finish", "", [this](host::engine::Session& session, const State::Call& call) {
    call.not_in_swap();
    state_->torch_model->check_bindings();
    session.finish();
  });
}
double Engine::mean(double value) {
  return state_->collective("mean", "",
                            [&](host::engine::Session& session, const State::Call&) { return session.mean(value); });
}
void Engine::validation(double loss) {
  const State::Call call(*state_, "validation");
  host::guard_host_call(call.text(), [&] { state_->session->validation(loss); });
}

bool Engine::validation_due() const {
  const int64_t every = state_->session_for("validation_due").config().eval().every, step = step_index();
  return step > 0 && every > 0 && (step % every == 0 || step == steps());
}

struct Engine::Evaluation::State {
  explicit State(Engine::State& owner) : engine(&owner), life(owner.life), random(host::model::RandomState::current()) {
    owner.collective("Evaluation", "begin", [&](host::engine::Session& session, const Engine::State::Call&) {
      owner.torch_model->check_buffers(owner.module->buffers());
      if (owner.evaluations == 0) session.evaluation(true);
      ++owner.evaluations;
    });
  }
  void end() {
    const bool alive = !life.expired() && !engine->must_leak() && engine->session;  // the engine can be used
    if (AtExit::process_exits()) return;  // the generator of libtorch may be gone
    (alive && engine->random ? *engine->random : random).restore();
    if (!alive) return;
    if (--engine->evaluations == 0) engine->random.reset();
    const bool unwinds = std::uncaught_exceptions() > exceptions;
    try {
      Engine::State::as_thrown([&] { engine->adopt_buffers(); });
    } catch (...) {
      if (engine->evaluations == 0 && engine->session) engine->session->end_evaluation_buffers();
      if (unwinds) return;
      throw;
    }
    if (unwinds) {
      if (engine->evaluations == 0 && engine->session) engine->session->end_evaluation_buffers();
      return;
    }
    engine->collective("Evaluation", "end", [&](host::engine::Session& session, const Engine::State::Call&) {
      if (engine->evaluations == 0) session.evaluation(false);
    });
  }
  Engine::State* const engine;
  const std::weak_ptr<const void> life;
  torch::NoGradGuard no_grad;
  const host::model::RandomState random;
  int exceptions = std::uncaught_exceptions();
};

Engine::Evaluation::Evaluation(Engine& engine) : state_(std::make_unique<State>(*engine.state_)) {}

Engine::Evaluation::~Evaluation() noexcept(false) { state_->end(); }

}  // namespace zr
