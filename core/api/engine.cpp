#include "zr/engine.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "engine/session.hpp"
#include "model/param_types.hpp"
#include "model/torch_model.hpp"
#include "module.hpp"
#include "plan/parameter_list.hpp"
#include "program_state.hpp"

namespace zr {

using host::LogicalRole;

namespace {
LogicalRole role_of(What what) {
  return what == What::value ? LogicalRole::value : what == What::gradient ? LogicalRole::gradient : LogicalRole::state;
}
}  // namespace

struct Engine::State {
  /// `before`: what a session with another list of parameters handed over.
  State(const Program& p, ProgramModule m, std::unique_ptr<host::Continued> before = nullptr)
      : program(p),
        module(std::move(m)),
        torch_model(module.parameters(), module.buffers(), host::float_named(p.text("train.dtype")), before != nullptr),
        session(p.state()->setup(), torch_model, std::move(before)) {
    at::set_num_threads(session.threads());
  }
  /// A program that was only asked what it trains says so, and ends here.
  static std::unique_ptr<State> make(const Program& program, const ProgramModule& module) {
    if (program.state()->tells_parameters()) {
      const host::TorchModel asked(module.parameters(), {}, host::float_named(program.text("train.dtype")));
      std::puts(host::to_json(asked.parameters()).c_str());
      std::exit(0);
    }
    host::check_param_types(module.parameters(), program.state()->setup().config, program.rank());
    return std::make_unique<State>(program, module);
  }
  Program program;
  ProgramModule module;
  host::TorchModel torch_model;
  host::Session session;
};

Engine::Handle::Handle() = default;
Engine::Handle::Handle(std::unique_ptr<State> state) : state_(std::move(state)) {}
Engine::Handle::~Handle() = default;
Engine::Handle& Engine::Handle::operator=(Handle&&) noexcept = default;
std::unique_ptr<Engine::State> Engine::Handle::take() { return std::move(state_); }
Engine::State* Engine::Handle::operator->() const {
  if (!state_)
    host::fail_user(
        "engine.refresh() failed, and this engine cannot be used any more; make a new engine, and load the "
        "checkpoint that the error of engine.refresh() names");
  return state_.get();
}

Engine::Engine(const std::string& toml, torch::nn::Module& model) : Engine(Program(toml), model) {}

Engine::Engine(const Program& program, torch::nn::Module& model) : state_(State::make(program, ProgramModule(model))) {}

Engine::Engine(const Program& program, torch::jit::Module& model) {
  torch::jit::setTensorExprFuserEnabled(false);
  // A graph that is optimised after its first runs gives other bits then, and how many runs that are depends on the
  // number of ranks.
  torch::jit::getProfilingMode() = false;
  state_ = State::make(program, ProgramModule(model));
}

Engine::~Engine() = default;

void Engine::refresh() {
  const Tensors parameters = state_->module.parameters(), buffers = state_->module.buffers();
  std::unique_ptr<host::Continued> handed;
  {
    State& before = *state_.operator->();
    host::ListChange change = change_of(before.torch_model, parameters);
    host::check_param_types(parameters, before.session.config(), before.session.rank());
    if (!before.session.agree_on_change(before.torch_model.relist(parameters, buffers), change)) return;
    handed = std::make_unique<host::Continued>(before.session.hand_over(std::move(change)));
    before.torch_model.hand_over();
  }
  // The new session takes rank 0's buffers, as every one; those that were there are this rank's own.
  std::vector<std::pair<torch::Tensor, torch::Tensor>> kept;
  for (const auto& [name, tensor] : buffers)
    if (state_->torch_model.has_buffer(tensor)) kept.emplace_back(tensor, tensor.detach().clone());
  const Program program = state_->program;
  const ProgramModule module = state_->module;
  state_.take().reset();
  const std::string folder = handed->folder;
  try {
    state_ = std::make_unique<State>(program, module, std::move(handed));
  } catch (const std::exception&) {
    if (program.rank() == 0)
      host::log(ZR_LOG_ERROR, "engine.refresh() failed; the state before it is the checkpoint " + folder);
    throw;
  }
  const torch::NoGradGuard no_grad;
  for (auto& [buffer, values] : kept) buffer.copy_(values);
}

void Engine::backward(const torch::Tensor& loss, double weight) {
  if (!loss.defined() || loss.numel() != 1)
    host::fail_user("engine.backward(loss): the loss has " + std::to_string(loss.defined() ? loss.numel() : 0) +
                    " elements, but must be one number");
  state_->torch_model.check_trained(state_->module.parameters());
  state_->session.begin_backward(loss.item<double>(), weight);
  const double factor = weight * state_->session.loss_scale();
  // The scale is beyond fp16: a loss in it is widened first.
  const torch::Tensor wide = factor != 1 && loss.scalar_type() == torch::kHalf ? loss.to(torch::kFloat) : loss;
  torch::autograd::backward({factor == 1 ? wide : wide * factor}, {});
  state_->session.end_backward();
}

bool Engine::step() { return state_->session.step(); }
bool Engine::done() const { return step_index() >= steps() || state_->session.stopped(); }

std::string Engine::save(const std::string& dir) {
  state_->torch_model.check_trained(state_->module.parameters());
  host::Session& session = state_->session;
  return session.save(dir, session.config().integer("checkpoint.keep"), session.config().boolean("checkpoint.async"));
}

Loaded Engine::load(const std::string& dir, const Load& how) {
  const host::LoadReport report = state_->session.load(dir, {how.weights_only, how.strict, how.convert, how.fallback});
  return {report.folder, report.missing, report.unexpected, report.other_shape, report.fresh, report.dropped};
}

void Engine::add_tokens(int64_t tokens) { state_->session.add_tokens(tokens); }
int Engine::rank() const { return state_->session.rank(); }
int Engine::world() const { return state_->session.world(); }
int Engine::accumulation() const { return state_->session.accumulation(); }
int64_t Engine::micro_batch() const { return state_->session.config().integer("train.micro_batch"); }
int64_t Engine::steps() const { return state_->session.config().integer("train.steps"); }
int64_t Engine::step_index() const { return state_->session.step_index(); }
int64_t Engine::micro_index() const { return state_->session.micro_index(); }
int64_t Engine::seed() const { return state_->session.config().integer("train.seed"); }
double Engine::last_loss() const { return state_->session.last_loss(); }
double Engine::loss_scale() const { return state_->session.loss_scale(); }
double Engine::last_grad_norm() const { return state_->session.last_grad_norm(); }
std::string Engine::weights_hash() { return state_->session.weights_hash(); }
void Engine::finish() { state_->session.finish(); }
double Engine::mean(double value) { return state_->session.mean(value); }
void Engine::validation(double loss) { state_->session.validation(loss); }

bool Engine::validation_due() const {
  const int64_t every = state_->session.config().integer("eval.every"), made = step_index();
  return made > 0 && every > 0 && (made % every == 0 || made == steps());
}

torch::Tensor Engine::get(const std::string& parameter, What what, const std::string& slot) {
  state_->torch_model.check_trained(state_->module.parameters(), parameter);
  host::Session& session = state_->session;
  const uint32_t index = session.find(parameter);
  torch::Tensor tensor = torch::empty(session.plan().input.parameters[index].shape, torch::kFloat);
  session.read(index, role_of(what), slot, tensor.data_ptr<float>());
  return tensor;
}

void Engine::set(const std::string& parameter, What what, const torch::Tensor& tensor, const std::string& slot) {
  state_->torch_model.check_trained(state_->module.parameters(), parameter);
  host::Session& session = state_->session;
  const uint32_t index = session.find(parameter);
  if (tensor.sizes().vec() != session.plan().input.parameters[index].shape)
    host::fail_user("engine.set('" + parameter + "'): the tensor's shape is not the parameter's");
  const torch::Tensor values = tensor.detach().to(torch::kFloat).contiguous();
  session.write(index, role_of(what), slot, values.data_ptr<float>());
}

struct Engine::Evaluation::State {
  explicit State(host::Session& s) : session(s), random(at::globalContext().defaultGenerator(at::kCPU).get_state()) {
    session.evaluation(true);
  }
  host::Session& session;
  torch::NoGradGuard no_grad;
  torch::Tensor random;
  int exceptions = std::uncaught_exceptions();
};

Engine::Evaluation::Evaluation(Engine& engine) : state_(std::make_unique<State>(engine.state_->session)) {}

Engine::Evaluation::~Evaluation() noexcept(false) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_state(state_->random);
  if (std::uncaught_exceptions() <= state_->exceptions) state_->session.evaluation(false);
}

}  // namespace zr
