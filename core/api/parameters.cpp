#include "zr/parameters.hpp"

#include <map>

#include "model/deferred.hpp"
#include "model/torch_model.hpp"
#include "model/trained.hpp"
#include "program_state.hpp"

namespace zr {

struct Gathered::State {
  std::map<host::TorchModel*, std::vector<uint32_t>> held;
  int exceptions = std::uncaught_exceptions();
};

Gathered::Gathered(const std::vector<torch::Tensor>& parameters) : state_(std::make_unique<State>()) {
  for (const torch::Tensor& tensor : parameters)
    if (const auto place = host::Trained::find(tensor.unsafeGetTensorImpl()))
      state_->held[place->model].push_back(place->param);
  for (const auto& [model, params] : state_->held) model->hold(params);
}

Gathered::~Gathered() noexcept(false) {
  if (std::uncaught_exceptions() > state_->exceptions) return;  // the job is ending
  for (const auto& [model, params] : state_->held) model->let_go(params);
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
