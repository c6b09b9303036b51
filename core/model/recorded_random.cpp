#include "model/recorded_random.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <mutex>
#include <string>
#include <string_view>

#include "model/temporary.hpp"

namespace zr::host::model {

namespace {
at::Generator default_generator() { return at::globalContext().defaultGenerator(at::kCPU); }

void set_random_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

at::Generator generator_of(const Stack& arguments) {
  for (const c10::IValue& value : arguments)
    if (value.isGenerator() && value.toGenerator().defined()) return value.toGenerator();
  return default_generator();
}
}  // namespace

bool draws(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool draws_by_values(const c10::OperatorHandle& op) {
  constexpr std::string_view kByShape =
      " normal uniform random bernoulli exponential cauchy geometric log_normal dropout native_dropout rand "
      "randn randint rand_like randn_like randint_like randperm multinomial alpha_dropout normal_functional "
      "feature_dropout feature_alpha_dropout ";
  std::string name = op.schema().name().substr(op.schema().name().find("::") + 2);
  if (name.back() == '_') name.pop_back();
  return kByShape.find(" " + name + " ") == std::string_view::npos;
}

at::Tensor random_state(const at::Generator& generator) {
  at::Generator copy = generator;  // the same generator
  const std::lock_guard lock(copy.mutex());
  return copy.get_state();
}

uint64_t hash_of(const at::Tensor& state) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over 8 bytes at a time
  const auto* bytes = static_cast<const char*>(state.const_data_ptr());
  for (std::size_t at = 0; at + sizeof(uint64_t) <= state.nbytes(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, sizeof word);
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 29;
  }
  return hash;
}

RandomUse RandomRecorder::draw(const c10::OperatorHandle& op, const Stack& arguments) {
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKey::DeferredInit);
  const at::NoGradGuard no_grad;
  RandomUse use{generator_of(arguments), std::nullopt, 0};
  const at::Tensor before = random_state(use.generator);
  Stack stack;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    stack.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!placeholder_of(tensor)) return tensor;
      return written ? temporary_like(tensor) : filled_temporary_like(tensor);
    }));
  }
  op.callBoxed(stack);
  Known& known = known_[use.generator.unsafeGetGeneratorImpl()];
  if (!known.generator.defined() || !same_bytes(known.after, before)) use.state = before;
  known = {use.generator, random_state(use.generator)};
  use.state_after = hash_of(known.after);
  return use;
}

KeptRandomState::KeptRandomState(const Stack& arguments)
    : generator_(generator_of(arguments)), state_(random_state(generator_)) {}
KeptRandomState::~KeptRandomState() { set_random_state(generator_, state_); }

RandomReplay::RandomReplay() : default_(default_generator()), before_(random_state(default_)), last_(before_) {}
RandomReplay::~RandomReplay() { set_random_state(default_, before_); }

void RandomReplay::begin(const RandomUse& use, Stack& arguments) {
  at::Generator generator = default_;
  if (use.generator != default_) {
    at::Generator& copy = copies_[use.generator.unsafeGetGeneratorImpl()];
    if (!copy.defined()) copy = use.generator.clone();
    generator = copy;
    for (c10::IValue& value : arguments)
      if (value.isGenerator()) value = generator;
  }
  if (use.state) set_random_state(generator, *use.state);
}

bool RandomReplay::end(const RandomUse* use) {
  const at::Tensor of_default = random_state(default_);
  if (use && use->generator != default_)
    return same_bytes(of_default, last_) &&
           hash_of(random_state(copies_.at(use->generator.unsafeGetGeneratorImpl()))) == use->state_after;
  const bool right = use ? hash_of(of_default) == use->state_after : same_bytes(of_default, last_);
  last_ = of_default;
  return right;
}

}  // namespace zr::host::model
