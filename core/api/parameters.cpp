#include "zr/parameters.hpp"

#include <algorithm>
#include <vector>

#include "api/at_exit.hpp"
#include "api/program_state.hpp"
#include "base/forked.hpp"
#include "model/deferred.hpp"
#include "model/parameter_registry.hpp"
#include "model/torch_model.hpp"

namespace zr {

struct Gathered::State {
  struct ModelGather {
    host::model::TorchModel* model;
    std::vector<uint32_t> params;  // in the model's order, without duplicates
    std::weak_ptr<const void> life;
  };
  std::vector<ModelGather> gathers;  // in the order in which their engines were created, which is the same on all ranks
  int exceptions = std::uncaught_exceptions();
  const host::OwnerProcess owner;
};

Gathered::Gathered(const std::vector<torch::Tensor>& parameters) : state_(std::make_unique<State>()) {
  for (const torch::Tensor& tensor : parameters)
    if (const auto ref = host::model::ParameterRegistry::find(tensor.unsafeGetTensorImpl())) {
      auto& gathers = state_->gathers;
      auto gather =
          std::find_if(gathers.begin(), gathers.end(), [&](const auto& item) { return item.model == ref->model; });
      if (gather == gathers.end()) gather = gathers.insert(gathers.end(), {ref->model, {}, ref->model->life()});
      gather->params.push_back(ref->param);
    }
  std::sort(state_->gathers.begin(), state_->gathers.end(),
            [](const auto& a, const auto& b) { return a.model->number() < b.model->number(); });
  for (auto& [model, params, life] : state_->gathers) {
    std::sort(params.begin(), params.end());
    params.erase(std::unique(params.begin(), params.end()), params.end());  // tied weights appear twice
    model->begin_gather(params);
  }
}

Gathered::~Gathered() noexcept(false) {
  if (state_->owner.is_parent() || AtExit::process_exits()) return;  // no engine of this process is in use
  const bool unwinding = std::uncaught_exceptions() > state_->exceptions;
  for (const auto& [model, params, life] : state_->gathers)
    if (!life.expired()) model->end_gather(params, !unwinding);  // the end of the engine has ended it otherwise
}

namespace detail {
using host::model::Construction;

struct DeferredScope::State {
  Construction::RecordingScope scope;
};
namespace {
[[maybe_unused]] const bool kRegistered = [] {
  build_without_memory = [] {
    [[maybe_unused]] static const auto* scope =
        new Construction::RecordingScope(Construction::Purpose::shapes);  // never destroyed
  };
  return true;
}();
}  // namespace
DeferredScope::DeferredScope() : state_(std::make_unique<State>()) {}
DeferredScope::~DeferredScope() = default;
}  // namespace detail

}  // namespace zr
