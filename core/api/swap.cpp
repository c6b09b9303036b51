#include "zr/swap.hpp"

#include <exception>
#include <sstream>

#include "api/engine_state.hpp"
#include "base/error.hpp"

namespace zr {

struct Swap::State {
  explicit State(Engine& owner) : engine(&*owner.state_), life(owner.state_->life) {}
  void begin(const Values& values);
  void end();

  Engine::State* const engine;
  const std::weak_ptr<const void> life;
  const int exceptions = std::uncaught_exceptions();
};

namespace {
// The values as fp32 in CPU memory, or an undefined tensor.
torch::Tensor checked(const torch::Tensor& tensor, const host::plan::Parameter& parameter, torch::Device device) {
  if (!tensor.defined()) return {};
  std::ostringstream problem;
  if (tensor.layout() != torch::kStrided || tensor.is_complex() || tensor.is_quantized() ||
      !(tensor.device().is_cpu() || tensor.device() == device))
    problem << "a dense, real tensor on the CPU or on engine.device() is needed, but it is " << tensor.layout() << " "
            << tensor.scalar_type() << " on " << tensor.device();
  else if (tensor.sizes() != parameter.shape)
    problem << "it has shape " << tensor.sizes() << ", but the parameter has shape "
            << c10::IntArrayRef(parameter.shape);
  if (!problem.str().empty())
    host::fail_user("zr::Swap: the tensor for '" + parameter.name + "' does not fit: " + problem.str());
  return tensor.detach().to(torch::kCPU, torch::kFloat).contiguous();
}
}  // namespace

void Swap::State::begin(const Values& values) {
  engine->collective("Swap", "begin", [&](host::engine::Session& session, const Engine::State::Call& call) {
    call.not_in_evaluation();
    call.not_in_swap();
    torch::Tensor tensor;
    const auto values_of = [&](uint32_t param) -> const float* {
      const host::plan::Parameter& parameter = session.plan().input.parameters[param];
      const torch::NoGradGuard no_grad;
      tensor =
          checked(engine->call_program("zr::Swap", [&] { return values(parameter.name); }), parameter, engine->device);
      return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
    };
    session.swap().begin(values_of);
    engine->finish_copies();
  });
}

void Swap::State::end() {
  if (life.expired() || engine->must_leak() || !engine->session || !engine->session->swap().active()) return;
  if (std::uncaught_exceptions() > exceptions) return engine->session->swap().abandon();
  engine->collective("Swap", "end", [&](host::engine::Session& session, const Engine::State::Call& call) {
    call.not_in_evaluation();
    session.swap().end();
    engine->finish_copies();
  });
}

Swap::Swap(Engine& engine, const Values& values) : state_(std::make_unique<State>(engine)) { state_->begin(values); }

// The names are checked where values are asked for: then all ranks throw if one has a wrong name.
Swap::Swap(Engine& engine, const std::map<std::string, torch::Tensor>& values)
    : state_(std::make_unique<State>(engine)) {
  std::map<uint32_t, decltype(values.begin())> by_index;
  bool is_checked = false;
  const auto check = [&](host::engine::TensorAccess& parameters) {
    for (auto value = values.begin(); value != values.end(); ++value) {
      const auto [other, inserted] = by_index.emplace(parameters.find(value->first), value);
      if (!inserted)
        host::fail_user("zr::Swap: '" + other->second->first + "' and '" + value->first +
                        "' are one tied parameter of the model; pass one of them");
    }
    is_checked = true;
  };
  state_->begin([&](const std::string& parameter) {
    host::engine::TensorAccess& parameters = state_->engine->session->tensors();
    if (!is_checked) check(parameters);
    const auto found = by_index.find(parameters.find(parameter));
    return found == by_index.end() ? torch::Tensor() : found->second->second;
  });
}

Swap::~Swap() noexcept(false) { state_->end(); }

}  // namespace zr
