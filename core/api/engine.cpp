#include "zr/engine.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <sstream>
#include <thread>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "engine/session.hpp"
#include "model/param_types.hpp"
#include "model/torch_model.hpp"
#include "module.hpp"
#include "plan/parameter_list.hpp"
#include "program_state.hpp"

namespace zr {

using host::LogicalRole;

namespace {
LogicalRole role_of(TensorKind kind) {
  return kind == TensorKind::value      ? LogicalRole::value
         : kind == TensorKind::gradient ? LogicalRole::gradient
                                        : LogicalRole::state;
}
}  // namespace

namespace {
torch::ScalarType torch_type(zr_dtype dtype) {
  return dtype == ZR_BF16 ? torch::kBFloat16 : dtype == ZR_F16 ? torch::kHalf : torch::kFloat;
}

// The parameter dtype of the most recently created engine, for advice about errors that libtorch throws.
std::atomic<const char*> last_dtype{nullptr};

std::string advice(const std::string& type, const std::string& text) {
  const char* dtype = last_dtype;
  if (!dtype || !type.starts_with("c10::")) return "";
  for (const char* words : {"same dtype", "scalar type", "should be the same", "Found dtype"})
    if (text.find(words) != text.npos)
      return std::string("the engine keeps parameters in ") + dtype +
             " (train.dtype): cast the inputs of the model to that type with x.to(engine.dtype())";
  return "";
}
}  // namespace

struct Engine::State {
  /// `before`: the state that refresh() took over from the previous session.
  State(const Program& p, ProgramModule m, const std::string& engine_name,
        std::unique_ptr<host::RefreshState> before = nullptr)
      : program(p),
        module(std::move(m)),
        name(engine_name),
        dtype(p.state()->setup().config.train().dtype),
        torch_model(std::in_place, module.parameters(), module.buffers(), dtype, before != nullptr),
        session(std::in_place, setup_of(p, name), *torch_model, std::move(before)) {
    at::set_num_threads(session->threads());
    last_dtype = host::name_of(dtype).data();  // points to a string literal
    host::set_advice(&advice);
  }
  static host::Setup setup_of(const Program& program, const std::string& name) {
    host::Setup setup = program.state()->setup();
    setup.engine = name;
    return setup;
  }
  /// Creates the state. If the process was started only to query its parameters, prints them and throws ExitRequest.
  static std::unique_ptr<State> make(const Program& program, const ProgramModule& module, const std::string& name) {
    if (program.state()->prints_parameters()) {
      const host::TorchModel queried(module.parameters(), {}, program.state()->setup().config.train().dtype);
      std::puts(host::to_json(queried.parameters()).c_str());
      throw ExitRequest{std::fflush(stdout) == 0 ? 0 : exit_code::environment};
    }
    if (module.parameters().empty())
      host::fail_user(
          "zr::Engine: the model has no parameters; register its submodules and parameters in the "
          "constructor (register_module, register_parameter)");
    return host::guard_host_call("zr::Engine", [&] {
      host::check_param_types(module.parameters(), program.state()->setup().config, program.rank());
      return std::make_unique<State>(program, module, name);
    });
  }
  /// The model's buffer of that name. Throws UserError, which suggests the nearest name.
  torch::Tensor buffer(const std::string& name) {
    torch_model->check_buffers(module.buffers());
    std::vector<std::string> names;
    for (const auto& [own, tensor] : module.buffers()) {
      if (own == name && tensor.defined()) return tensor;
      names.push_back(own);
    }
    const std::string near = host::nearest(name, names);
    host::fail_user("the model has no buffer '" + host::printable(name) + "'" +
                    (near.empty() ? "" : "; did you mean '" + near + "'?"));
  }
  /// Makes the engine use the buffers that the model has now.
  void adopt_buffers() {
    if (session && torch_model->has_buffers()) torch_model->adopt_buffers(module.buffers());
  }
  /// The session. Throws after release(); `name` is the engine method that needs it ("step").
  host::Session& live(const char* name) {
    if (!session)
      host::fail_user(std::string("engine.") + name +
                      "() was called after engine.release(); create a new engine for the model");
    return *session;
  }
  /// The scope of one public call: checks that it is on the training thread and not inside another call, and names the
  /// call in error reports.
  class Call {
   public:
    Call(State& state, const char* name, const std::string& arguments = "")
        : state_(state), text_(std::string("engine.") + name + "(" + arguments + ")") {
      host::Session& session = state.live(name);
      if (std::this_thread::get_id() != state.thread)
        host::fail_user(text_ +
                        " was called on another thread than the one that created the engine; use one thread for both");
      if (!state.call.empty())
        host::fail_user(text_ + " was called inside " + state.call +
                        ", from a hook or an autograd function; call it after " + state.call + " returns");
      state.call = text_;
      scope_.emplace(session.communicator(), text_);
    }
    ~Call() {
      scope_.reset();
      state_.call.clear();
    }
    Call(const Call&) = delete;
    const std::string& text() const { return text_; }
    void not_in_evaluation() const {
      if (state_.evaluations > 0)
        host::fail_user(text_ + " was called inside a zr::Engine::Evaluation; end that scope first");
    }

   private:
    State& state_;
    std::string text_;
    std::optional<host::CallScope> scope_;
  };
  /// Runs fn(session, call) in the scope of a Call, after it has checked that all ranks make the same call. Collective.
  template <class Fn>
  auto collective(const char* name, const std::string& arguments, Fn&& fn) {
    const Call call(*this, name, arguments);
    session->meet(call.text());
    return host::guard_host_call(call.text(), [&] { return fn(*session, call); });
  }

  Program program;
  ProgramModule module;
  std::string name;
  const zr_dtype dtype;
  std::optional<host::TorchModel> torch_model;  // empty after release(), like session
  std::optional<host::Session> session;
  const std::thread::id thread = std::this_thread::get_id();
  std::string call;      // the call in progress, or ""
  int evaluations = 0;   // number of open Evaluation scopes
  torch::Tensor random;  // after a load() inside a scope: the random state that its end restores; otherwise undefined
  const std::shared_ptr<const void> life = std::make_shared<char>();
};

Engine::Handle::Handle() = default;
Engine::Handle::Handle(std::unique_ptr<State> state) : state_(std::move(state)) {}
Engine::Handle::~Handle() = default;
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
    : state_(State::make(program, ProgramModule(model), name)) {}

Engine::Engine(const Program& program, torch::jit::Module& model, const std::string& name) {
  torch::jit::setTensorExprFuserEnabled(false);
  // The profiling executor optimizes a graph after its first runs, which changes results, and the number of runs per
  // rank depends on the number of ranks.
  torch::jit::getProfilingMode() = false;
  state_ = State::make(program, ProgramModule(model), name);
}

Engine::~Engine() = default;

void Engine::refresh() {
  state_->live("refresh");
  const Tensors parameters = state_->module.parameters(), buffers = state_->module.buffers();
  const Program program = state_->program;
  const ProgramModule module = state_->module;
  const std::string name = state_->name;
  auto handed = std::make_unique<host::RefreshState>();
  std::string folder;
  // A new session broadcasts rank 0's buffers, so this rank's own values of existing buffers are saved and restored.
  std::vector<std::pair<torch::Tensor, torch::Tensor>> kept;
  {
    State& before = *state_;
    const State::Call call(before, "refresh");
    call.not_in_evaluation();
    host::ParameterChange change;
    const auto look = [&](host::ParameterChange& found) {
      before.adopt_buffers();
      found = parameter_change(*before.torch_model, parameters, buffers);
      host::check_param_types(parameters, before.session->config(), before.session->rank());
      std::vector<host::Parameter> list = before.torch_model->list_parameters(parameters, buffers);
      if (!found.any) return list;
      for (const auto& [own, tensor] : buffers)
        if (before.torch_model->has_buffer(tensor)) kept.emplace_back(tensor, tensor.detach().clone());
      return list;
    };
    if (!before.session->refresh().agree_on_change(look, change)) return;
    *handed = before.session->hand_over(std::move(change));
    before.torch_model->hand_over();
  }
  try {
    state_.take().reset();
    folder = handed->folder;
    auto next = std::make_unique<State>(program, module, name, std::move(handed));
    const torch::NoGradGuard no_grad;
    for (auto& [buffer, values] : kept) buffer.copy_(values);
    state_ = std::move(next);
  } catch (const std::exception&) {
    if (program.rank() == 0)
      host::log(ZR_LOG_ERROR, "engine.refresh() failed; the checkpoint " + folder + " has the state before the call");
    throw;
  }
}

void Engine::backward(const torch::Tensor& loss, double weight) {
  const State::Call call(*state_, "backward");
  host::Session& session = *state_->session;
  call.not_in_evaluation();
  if (!loss.defined())
    host::fail_user("engine.backward(loss): the loss is an undefined tensor; pass the result of the forward pass");
  if (loss.numel() != 1)
    host::fail_user("engine.backward(loss): the loss has " + std::to_string(loss.numel()) +
                    " elements, but must have exactly one; reduce it, for example with loss.mean()");
  state_->torch_model->check_trained(state_->module.parameters());
  if (!session.checkpointer().dir().empty())  // a checkpoint may be due in step()
    state_->torch_model->check_buffers(state_->module.buffers());
  if (!loss.requires_grad())
    host::fail_user(
        "engine.backward(loss): the loss has no autograd graph (requires_grad is false), so no parameter would get a "
        "gradient; compute it from the model's parameters, without detach(), torch::NoGradGuard or "
        "zr::Engine::Evaluation around the forward pass");
  session.begin_backward(loss.item<double>(), weight);
  try {
    // A loss of weight 0 is not scaled: its gradients are dropped on arrival, even if they are NaN.
    const double factor = weight == 0 ? 1 : weight * session.progress().loss_scale().value();
    // The loss scale exceeds the range of fp16, so an fp16 loss is upcast first.
    const bool upcasts = factor != 1 && loss.scalar_type() == torch::kHalf;
    const torch::Tensor root = upcasts ? loss.to(torch::kFloat) : loss;
    torch::autograd::backward({factor == 1 ? root : root * factor}, {});
  } catch (...) {
    session.fail_backward();
    throw;
  }
  session.end_backward();
}

bool Engine::step() {
  const State::Call call(*state_, "step");
  call.not_in_evaluation();
  if (state_->session->progress().at_boundary()) {
    if (state_->session->checkpointer().dir().empty())
      state_->adopt_buffers();
    else
      state_->torch_model->check_buffers(state_->module.buffers());
  }
  return host::guard_host_call(call.text(), [&] { return state_->session->step(); });
}
bool Engine::done() const { return state_->live("done").progress().done(); }

std::string Engine::save(const std::string& dir) {
  return state_->collective("save", "", [&](host::Session& session, const State::Call&) {
    state_->torch_model->check_trained(state_->module.parameters());
    state_->torch_model->check_buffers(state_->module.buffers());
    if (dir.empty()) host::fail_user("engine.save(dir): the folder name is empty; name a folder for checkpoints");
    return session.checkpointer().save(dir, session.config().checkpoint().keep, session.config().checkpoint().async);
  });
}

LoadReport Engine::load(const std::string& dir, const LoadOptions& how) {
  return state_->collective("load", "", [&](host::Session& session, const State::Call&) -> LoadReport {
    if (dir.empty())
      host::fail_user("engine.load(dir): the folder name is empty; name a checkpoint or a folder of checkpoints");
    state_->adopt_buffers();
    host::LoadReport report =
        session.checkpointer().load(dir, {how.weights_only, how.strict, how.convert, how.fallback});
    if (state_->evaluations > 0) state_->random = at::globalContext().defaultGenerator(at::kCPU).get_state();
    return {
        report.folder,           std::move(report.missing), std::move(report.unexpected), std::move(report.other_shape),
        std::move(report.fresh), std::move(report.dropped)};
  });
}

void Engine::release() {
  state_->live("release");
  release(dtype());
}
void Engine::release(torch::ScalarType dtype) {
  state_->collective("release", "", [&](host::Session& session, const State::Call& call) {
    call.not_in_evaluation();
    if (dtype != torch::kFloat && dtype != torch_type(state_->dtype))
      host::fail_user("engine.release(dtype): dtype is " + std::string(c10::toString(dtype)) + ", but must be " +
                      (state_->dtype == ZR_F32 ? "" : "torch::kFloat or ") + "engine.dtype(), which is " +
                      c10::toString(torch_type(state_->dtype)));
    state_->adopt_buffers();
    session.return_weights(dtype == torch::kFloat ? zr_dtype{ZR_F32} : state_->dtype);
  });
  state_->session.reset();
  state_->torch_model.reset();
}

void Engine::add_tokens(int64_t tokens) {
  host::Session& session = state_->live("add_tokens");
  if (tokens < 0)
    host::fail_user("engine.add_tokens(" + std::to_string(tokens) + "): the number of tokens must not be negative");
  session.progress().add_tokens(tokens);
}
int Engine::rank() const { return state_->live("rank").rank(); }
int Engine::world() const { return state_->live("world").world(); }
int Engine::accumulation() const { return state_->live("accumulation").progress().accumulation(); }
int64_t Engine::micro_batch() const { return state_->live("micro_batch").config().train().micro_batch; }
int64_t Engine::steps() const { return state_->live("steps").config().train().steps; }
int64_t Engine::step_index() const { return state_->live("step_index").progress().step(); }
int64_t Engine::micro_index() const { return state_->live("micro_index").micro_index(); }
int64_t Engine::seed() const { return state_->live("seed").config().train().seed; }
double Engine::last_loss() const { return state_->live("last_loss").progress().loss(); }
double Engine::loss_scale() const { return state_->live("loss_scale").progress().loss_scale().value(); }
double Engine::last_grad_norm() const { return state_->live("last_grad_norm").progress().grad_norm(); }
torch::ScalarType Engine::dtype() const {
  state_->live("dtype");
  return torch_type(state_->dtype);
}
std::string Engine::weights_hash() {
  return state_->collective(
      "weights_hash", "", [](host::Session& session, const State::Call&) { return session.tensors().weights_hash(); });
}
void Engine::finish() {
  state_->collective("finish", "", [](host::Session& session, const State::Call&) { session.finish(); });
}
double Engine::mean(double value) {
  return state_->collective("mean", "",
                            [&](host::Session& session, const State::Call&) { return session.mean(value); });
}
void Engine::validation(double loss) {
  const State::Call call(*state_, "validation");
  host::guard_host_call(call.text(), [&] { state_->session->validation(loss); });
}

bool Engine::validation_due() const {
  const int64_t every = state_->live("validation_due").config().eval().every, made = step_index();
  return made > 0 && every > 0 && (made % every == 0 || made == steps());
}

namespace {
// The arguments of engine.get() or engine.set() in error reports: "\"b.weight\", state, \"exp_avg\"".
std::string arguments_of(const std::string& parameter, TensorKind kind, const std::string& slot) {
  std::string text = "\"" + host::printable(parameter) + "\"";
  if (kind == TensorKind::gradient) text += ", gradient";
  if (kind == TensorKind::state) text += ", state, \"" + host::printable(slot) + "\"";
  return text;
}

void check_slot(const std::string& call, TensorKind kind, const std::string& slot) {
  if (kind != TensorKind::state && !slot.empty())
    host::fail_user(call + ": '" + host::printable(slot) +
                    "' names an optimizer state; pass it with zr::TensorKind::state, or leave it empty");
}
}  // namespace

torch::Tensor Engine::get(const std::string& parameter, TensorKind kind, const std::string& slot) {
  return state_->collective(
      "get", arguments_of(parameter, kind, slot), [&](host::Session& session, const State::Call& call) {
        check_slot(call.text(), kind, slot);
        state_->torch_model->check_trained(state_->module.parameter(parameter));
        const uint32_t index = session.tensors().find(parameter);
        torch::Tensor tensor = torch::empty(session.plan().input.parameters[index].shape, torch::kFloat);
        session.tensors().read(index, role_of(kind), slot, tensor.data_ptr<float>());
        return tensor;
      });
}

void Engine::set(const std::string& parameter, TensorKind kind, const torch::Tensor& tensor, const std::string& slot) {
  state_->collective("set", arguments_of(parameter, kind, slot), [&](host::Session& session, const State::Call& call) {
    check_slot(call.text(), kind, slot);
    state_->torch_model->check_trained(state_->module.parameter(parameter));
    const uint32_t index = session.tensors().find(parameter);
    const std::vector<int64_t>& shape = session.plan().input.parameters[index].shape;
    if (!tensor.defined()) host::fail_user(call.text() + ": the tensor is undefined; pass a tensor with values");
    if (tensor.layout() != torch::kStrided || !tensor.device().is_cpu() || tensor.is_complex() || tensor.is_quantized())
      host::fail_user(call.text() + ": the tensor is " + c10::toString(tensor.scalar_type()) + " on " +
                      tensor.device().str() + (tensor.layout() == torch::kStrided ? "" : ", not dense") +
                      ", but must be a dense, real tensor in CPU memory");
    if (tensor.sizes() != shape) {
      std::ostringstream text;
      text << call.text() << ": the tensor has shape " << tensor.sizes() << ", but the parameter has shape "
           << c10::IntArrayRef(shape);
      host::fail_user(text.str());
    }
    const torch::Tensor values = tensor.detach().to(torch::kFloat).contiguous();
    session.tensors().write(index, role_of(kind), slot, values.data_ptr<float>());
  });
}

torch::Tensor Engine::buffer(const std::string& name) {
  return state_->collective("buffer", "\"" + host::printable(name) + "\"",
                            [&](host::Session& session, const State::Call&) {
                              const torch::Tensor own = state_->buffer(name);
                              torch::Tensor value = torch::empty(own.sizes(), own.options());
                              if (value.numel() == 0) return value;
                              const std::string bytes = session.tensors().buffer(name);
                              if (bytes.size() != value.nbytes())
                                host::fail_internal("buffer '" + name + "' has " + std::to_string(bytes.size()) +
                                                    " bytes, not " + std::to_string(value.nbytes()));
                              std::memcpy(value.data_ptr(), bytes.data(), bytes.size());
                              return value;
                            });
}

void Engine::set_buffer(const std::string& name, const torch::Tensor& tensor) {
  state_->collective(
      "set_buffer", "\"" + host::printable(name) + "\"", [&](host::Session& session, const State::Call& call) {
        const torch::Tensor own = state_->buffer(name);
        if (!tensor.defined()) host::fail_user(call.text() + ": the tensor is undefined; pass a tensor with values");
        if (tensor.sizes() != own.sizes())
          host::fail_user("engine.set_buffer('" + name + "'): the tensor has shape " + c10::str(tensor.sizes()) +
                          ", but the buffer has shape " + c10::str(own.sizes()));
        const torch::Tensor value = tensor.detach().to(own.options()).contiguous();
        if (value.numel() > 0)
          session.tensors().set_buffer(name, std::string(static_cast<const char*>(value.data_ptr()), value.nbytes()));
      });
}

struct Engine::Evaluation::State {
  explicit State(Engine::State& owner)
      : engine(&owner), life(owner.life), random(at::globalContext().defaultGenerator(at::kCPU).get_state()) {
    owner.collective("Evaluation", "begin", [&](host::Session& session, const Engine::State::Call&) {
      owner.torch_model->check_buffers(owner.module.buffers());
      if (owner.evaluations == 0) session.evaluation(true);
      ++owner.evaluations;
    });
  }
  void end() {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const bool alive = !life.expired();  // the engine still exists
    generator.set_state(alive && engine->random.defined() ? engine->random : random);
    if (!alive) return;
    if (--engine->evaluations == 0) engine->random = torch::Tensor();
    const bool unwinds = std::uncaught_exceptions() > exceptions;
    try {
      engine->adopt_buffers();
    } catch (const std::exception&) {
      if (engine->evaluations == 0 && engine->session) engine->session->end_evaluation_buffers();
      if (unwinds) return;
      throw;
    }
    if (unwinds) {
      if (engine->evaluations == 0 && engine->session) engine->session->end_evaluation_buffers();
      return;
    }
    engine->collective("Evaluation", "end", [&](host::Session& session, const Engine::State::Call&) {
      if (engine->evaluations == 0) session.evaluation(false);
    });
  }
  Engine::State* const engine;
  const std::weak_ptr<const void> life;
  torch::NoGradGuard no_grad;
  torch::Tensor random;
  int exceptions = std::uncaught_exceptions();
};

Engine::Evaluation::Evaluation(Engine& engine) : state_(std::make_unique<State>(*engine.state_)) {}

Engine::Evaluation::~Evaluation() noexcept(false) { state_->end(); }

}  // namespace zr
