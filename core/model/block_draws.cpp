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

// Undefined if it no longer exists.
at::Generator generator_of(const c10::weak_intrusive_ptr<c10::GeneratorImpl>& generator) {
  c10::intrusive_ptr<c10::GeneratorImpl> impl = generator.lock();
  return impl ? at::Generator(std::move(impl)) : at::Generator();
}
}  // namespace

BlockDraws::BlockDraws(const std::vector<at::Device>& devices) {
  for (const at::Device& device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    generators_.push_back({WeakGenerator(generator.getIntrusivePtr()), state_of(generator), {}, false});
  }
  defaults_ = generators_.size();
}

void BlockDraws::begins(const OperatorCall& call) {
  if (!call.draws()) return;
  for (const c10::IValue& argument : call.arguments) {
    if (!argument.isGenerator()) continue;
    at::Generator generator = argument.toGenerator();
    const WeakGenerator identity(generator.getIntrusivePtr());
    const auto known =
        std::ranges::find_if(generators_, [&](const Drawn& drawn) { return drawn.generator == identity; });
    if (known != generators_.end())
      known->by_operators = true;
    else
      generators_.push_back({identity, state_of(generator), {}, true});
    return;
  }
  // Which device the operator runs on does not follow from its arguments alone, so all default generators count. They
  // are the first ones.
  for (std::size_t i = 0; i < defaults_; ++i) generators_[i].by_operators = true;
}

void BlockDraws::end() {
  std::erase_if(generators_, [](Drawn& drawn) {
    at::Generator generator = generator_of(drawn.generator);
    if (!generator.defined()) return true;
    drawn.after = state_of(generator);
    return !drawn.by_operators && at::equal(drawn.before, drawn.after);  // the block drew nothing
  });
}

BlockDraws::Repeated::Repeated(const BlockDraws& draws) : draws_(draws) {
  for (const Drawn& drawn : draws.generators_) {
    const at::Generator generator = generator_of(drawn.generator);
    states_.push_back({generator, generator.defined() ? replace_state(generator, drawn.before) : torch::Tensor()});
  }
}

BlockDraws::Repeated::~Repeated() {
  log_exception_of([&] {
    for (const State& state : states_)
      if (state.generator.defined()) replace_state(state.generator, state.before);
  });
}

void BlockDraws::Repeated::finish() {
  bool same = true;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (!states_[i].generator.defined()) continue;
    const Drawn& drawn = draws_.generators_[i];
    const torch::Tensor after = replace_state(states_[i].generator, states_[i].before);
    same &= !drawn.by_operators || at::equal(after, drawn.after);
  }
  states_.clear();
  if (!same)
    fail_user(
        "the block of zr::checkpoint did not draw the same random numbers when it was recomputed: another thread drew "
        "from libtorch's default generator during one of the runs (give other threads, such as data loaders, "
        "generators of their own: at::make_generator<at::CPUGeneratorImpl>(seed)), or train() or eval() was called "
        "between forward and backward (call it after backward), or the block draws depending on more than its inputs "
        "and the model");
}

}  // namespace zr::host::model
