#include "zr/parameters.hpp"

#include <algorithm>
#include <map>

#include "model/deferred.hpp"
#include "model/torch_model.hpp"
#include "model/trained.hpp"
#include "program_state.hpp"

namespace zr {

struct Gathered::State {
  struct Held {
    std::vector<uint32_t> params;  // each once, in the model's order
    std::weak_ptr<const void> life;
  };
  std::map<host::TorchModel*, Held> held;
  int exceptions = std::uncaught_exceptions();
};

Gathered::Gathered(const std::vector<torch::Tensor>& parameters) : state_(std::make_unique<State>()) {
  for (const torch::Tensor& tensor : parameters)
    if (const auto place = host::Trained::find(tensor.unsafeGetTensorImpl()))
      state_->held[place->model].params.push_back(place->param);
  for (auto& [model, held] : state_->held) {
    auto& params = held.params;
    held.life = model->life();
    std::sort(params.begin(), params.end());
    params.erase(std::unique(params.begin(), params.end()), params.end());  // tied weights come twice
    model->hold(params);
  }
}

Gathered::~Gathered() noexcept(false) {
  const bool unwinding = std::uncaught_exceptions() > state_->exceptions;
  for (const auto& [model, held] : state_->held)
    if (!held.life.expired()) model->let_go(held.params, !unwinding);  // else it ended with its engine
}

namespace detail {
struct DeferredScope::State {
  host::Construction::Scope scope;
};
namespace {
[[maybe_unused]] const bool told = [] {
  build_without_memory = [] { [[maybe_unused]] static const auto* scope = new DeferredScope; };  // to the process's end
  return true;
}();
}  // namespace
DeferredScope::DeferredScope() : state_(std::make_unique<State>()) {}
DeferredScope::~DeferredScope() = default;
}  // namespace detail

}  // namespace zr
