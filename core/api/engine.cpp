#include "zr/engine.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "engine/session.hpp"
#include "model/param_types.hpp"
#include "model/torch_model.hpp"
#include "plan/parameter_list.hpp"
#include "program_state.hpp"

namespace zr {

using host::LogicalRole;

namespace {
std::vector<std::pair<std::string, torch::Tensor>> pairs(const torch::OrderedDict<std::string, torch::Tensor>& dict) {
  std::vector<std::pair<std::string, torch::Tensor>> list;
  for (const auto& item : dict) list.emplace_back(item.key(), item.value());
  return list;
}

LogicalRole role_of(What what) {
  return what == What::value ? LogicalRole::value : what == What::gradient ? LogicalRole::gradient : LogicalRole::state;
}
}  // namespace

struct Engine::State {
  using Tensors = std::vector<std::pair<std::string, torch::Tensor>>;
  State(const Program& program, const Tensors& parameters, const Tensors& buffers, const std::string& name)
      : torch_model(parameters, buffers, host::float_named(program.text("train.dtype"))),
        session(setup_of(program, name), torch_model) {
    at::set_num_threads(session.threads());
  }
  static host::Setup setup_of(const Program& program, const std::string& name) {
    host::Setup setup = program.state()->setup();
    setup.engine = name;
    return setup;
  }
  /// A program that was only asked what it trains says so, and ends here.
  static std::unique_ptr<State> make(const Program& program, const Tensors& parameters, const Tensors& buffers,
                                     const std::string& name) {
    if (program.state()->tells_parameters()) {
      const host::TorchModel asked(parameters, {}, host::float_named(program.text("train.dtype")));
      std::puts(host::to_json(asked.parameters()).c_str());
      std::exit(0);
    }
    host::check_param_types(parameters, program.state()->setup().config, program.rank());
    return std::make_unique<State>(program, parameters, buffers, name);
  }
  host::TorchModel torch_model;
  host::Session session;
};

Engine::Engine(const std::string& toml, torch::nn::Module& model) : Engine(Program(toml), model) {}

Engine::Engine(const Program& program, torch::nn::Module& model, const std::string& name)
    : state_(State::make(program, pairs(model.named_parameters()), pairs(model.named_buffers()), name)) {}

Engine::Engine(const Program& program, torch::jit::Module& model, const std::string& name) {
  torch::jit::setTensorExprFuserEnabled(false);
  // A graph that is optimised after its first runs gives other bits then, and how many runs that are depends on the
  // number of ranks.
  torch::jit::getProfilingMode() = false;
  State::Tensors parameters, buffers;
  for (const auto& item : model.named_parameters()) parameters.emplace_back(item.name, item.value);
  for (const auto& item : model.named_buffers()) buffers.emplace_back(item.name, item.value);
  state_ = State::make(program, parameters, buffers, name);
}

Engine::~Engine() = default;

void Engine::backward(const torch::Tensor& loss, double weight) {
  if (!loss.defined() || loss.numel() != 1)
    host::fail_user("engine.backward(loss): the loss has " + std::to_string(loss.defined() ? loss.numel() : 0) +
                    " elements, but must be one number");
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
  host::Session& session = state_->session;
  const uint32_t index = session.find(parameter);
  torch::Tensor tensor = torch::empty(session.plan().input.parameters[index].shape, torch::kFloat);
  session.read(index, role_of(what), slot, tensor.data_ptr<float>());
  return tensor;
}

void Engine::set(const std::string& parameter, What what, const torch::Tensor& tensor, const std::string& slot) {
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
