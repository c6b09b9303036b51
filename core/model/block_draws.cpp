#include "model/block_draws.hpp"

#include <ATen/Context.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <mutex>

#include "base/error.hpp"
#include "base/log.hpp"

namespace zr::host::model {

namespace {
torch::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());  // libtorch's mutex
  return generator.get_state();
}

// The state before the call.
torch::Tensor replace_state(at::Generator generator, const torch::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  torch::Tensor before = generator.get_state();
  generator.set_state(state);
  return before;
}
}  // namespace

BlockDraws::BlockDraws(const std::vector<at::Device>& devices) {
  for (const at::Device& device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    generators_.push_back({generator, state_of(generator), {}, false});
  }
}

void BlockDraws::begins(const OperatorCall& call) {
  if (!call.draws()) return;
  for (const c10::IValue& argument : call.arguments) {
    if (!argument.isGenerator()) continue;
    at::Generator generator = argument.toGenerator();
    const auto known =
        std::ranges::find_if(generators_, [&](const Drawn& drawn) { return drawn.generator == generator; });
    if (known != generators_.end())
      known->by_operators = true;
    else
      generators_.push_back({generator, state_of(generator), {}, true});
    return;
  }
  // Which device the operator runs on does not follow from its arguments alone, so all default generators count.
  for (Drawn& drawn : generators_)
    if (at::globalContext().defaultGenerator(drawn.generator.device()) == drawn.generator) drawn.by_operators = true;
}

void BlockDraws::end() {
  for (Drawn& drawn : generators_) drawn.after = state_of(drawn.generator);
  std::erase_if(generators_, [](const Drawn& drawn) {
    return !drawn.by_operators && at::equal(drawn.before, drawn.after);  // the block drew nothing
  });
}

BlockDraws::Repeated::Repeated(const BlockDraws& draws) : draws_(draws) {
  for (const Drawn& drawn : draws.generators_) states_.push_back(replace_state(drawn.generator, drawn.before));
}

BlockDraws::Repeated::~Repeated() {
  log_exception_of([&] {
    for (std::size_t i = 0; i < states_.size(); ++i) replace_state(draws_.generators_[i].generator, states_[i]);
  });
}

void BlockDraws::Repeated::finish() {
  bool same = true;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    const Drawn& drawn = draws_.generators_[i];
    const torch::Tensor after = replace_state(drawn.generator, states_[i]);
    same &= !drawn.by_operators || at::equal(after, drawn.after);
  }
  states_.clear();
  if (!same)
    fail_user(
        "the block of zr::checkpoint did not draw the same random numbers when it was recomputed: another thread drew "
        "from libtorch's default generator during one of the runs, or the block draws depending on more than its "
        "inputs and the model; give other threads, such as data loaders, generators of their own "
        "(at::make_generator<at::CPUGeneratorImpl>(seed))");
}

}  // namespace zr::host::model
