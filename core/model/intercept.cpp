#include "model/intercept.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "model/kept_tensors.hpp"
#include "model/process_setup.hpp"

namespace zr::host::model {

namespace {
constexpr auto kKey = kPlaceholderKey;
thread_local OperatorRecorder* recorder = nullptr;

void add(const at::Tensor& tensor, bool written, std::vector<ParamUse>& param_uses) {
  Placeholder* placeholder = Placeholder::find(tensor);
  if (!placeholder) return;
  for (ParamUse& use : param_uses)
    if (use.placeholder == placeholder) {
      use.written |= written;
      return;
    }
  param_uses.push_back({placeholder, written});
}

// Properties of an operator that each call needs.
struct OperatorTraits {
  bool view;
  bool replaces;  // replaces a tensor's storage; Module::to calls the last of these before it does that
};
using OperatorCache = std::unordered_map<const c10::FunctionSchema*, OperatorTraits>;

// This thread's cache. It is freed at the end of the thread; an operator that runs later, in the destructor of an
// object of the thread or of a static object, makes another one, which is not freed.
OperatorCache& operator_cache() {
  thread_local OperatorCache* cache = nullptr;
  struct Owner {
    ~Owner() { delete std::exchange(cache, nullptr); }
  };
  if (cache) return *cache;
  cache = new OperatorCache;
  thread_local const Owner owner;  // destroyed: at the end of the thread
  static_cast<void>(&owner);
  return *cache;
}

const OperatorTraits& traits_of(const c10::FunctionSchema& schema) {
  OperatorCache& known = operator_cache();
  const auto at = known.find(&schema);
  if (at != known.end()) return at->second;
  static const auto* replacing = new std::set<std::string>{
      "aten::set_", "aten::resize_", "aten::resize_as_", "aten::_has_compatible_shallow_copy_type"};  // never destroyed
  return known.emplace(&schema, OperatorTraits{is_view(schema), replacing->count(schema.name()) > 0}).first->second;
}

// Handles an operator that replaces the storage of a placeholder's tensor. Within a zr::gather scope set_(source),
// which torch::load() calls, copies the source's values instead; all other cases are errors.
void replace(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) {
  const std::size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor self = (*stack)[first].toTensor();
  const Placeholder* placeholder = Placeholder::find(self);
  if (!placeholder || !placeholder->provider()) return op.redispatchBoxed(remaining_keys, stack);
  // Module::to() to what the module is already: the parameter replaces itself.
  if (op.schema().name() == "aten::_has_compatible_shallow_copy_type" && (*stack)[first + 1].toTensor().is_same(self))
    return op.redispatchBoxed(remaining_keys, stack);
  if (op.schema().name() != "aten::set_" || op.schema().overload_name() != "source_Tensor" ||
      !placeholder->provider()->in_scope(*placeholder))
    fail_user(placeholder->reason() + "; to replace its data, " + placeholder->provider()->remedy());
  const at::Tensor source = (*stack)[first + 1].toTensor();
  if (source.sizes() != self.sizes())
    fail_user("cannot load a tensor of " + std::to_string(source.numel()) + " elements and " +
              std::to_string(source.dim()) + " dimensions into a parameter of " + std::to_string(self.numel()) +
              " elements and " + std::to_string(self.dim()) + " dimensions: " + placeholder->reason());
  self.copy_(source);  // calls run_with_memory() again
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(self);
}

// Calls `call` once per provider with its uses, which are adjacent. `n`: the total number of uses.
template <class F>
void by_provider(const std::vector<ParamUse>& param_uses, std::size_t n, F&& call) {
  for (std::size_t first = 0; first < n;) {
    MemoryProvider* provider = param_uses[first].placeholder->provider();
    std::size_t end = first + 1;
    while (end < n && param_uses[end].placeholder->provider() == provider) ++end;
    call(provider, param_uses.data() + first, end - first);
    first = end;
  }
}

void leave(const std::vector<ParamUse>& param_uses, std::size_t n, bool done) {
  by_provider(param_uses, n, [&](MemoryProvider* provider, const ParamUse* first, std::size_t count) {
    if (provider) provider->leave(first, count, done);
  });
}

void enter(std::vector<ParamUse>& param_uses) {
  std::stable_sort(param_uses.begin(), param_uses.end(), [](const ParamUse& a, const ParamUse& b) {
    return std::less<>()(a.placeholder->provider(), b.placeholder->provider());
  });
  std::size_t entered = 0;
  try {
    by_provider(param_uses, param_uses.size(), [&](MemoryProvider* provider, const ParamUse* first, std::size_t count) {
      if (!provider) fail_user(first->placeholder->reason());
      provider->enter(first, count);
      entered += count;
    });
  } catch (...) {
    leave(param_uses, entered, false);
    throw;
  }
}

// Runs an operator whose arguments have memory. An error about their types names the buffers that are kept as they are.
void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) {
  if (!KeptTensors::any()) return op.redispatchBoxed(remaining_keys, stack);
  const KeptTensors::Storages storages = KeptTensors::used(op, *stack);
  try {
    op.redispatchBoxed(remaining_keys, stack);
  } catch (const c10::Error& error) {
    const std::string reason = error.what_without_backtrace();
    const std::string kept = KeptTensors::is_type_error(reason) ? KeptTensors::describe(storages) : "";
    if (kept.empty()) throw;
    fail_user(op.schema().name() + ": " + reason + ": " + kept);
  }
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) {
  std::vector<ParamUse> param_uses;
  find_param_uses(op, *stack, param_uses);
  if (param_uses.empty()) return redispatch(op, remaining_keys, stack);
  const OperatorTraits& traits = traits_of(op.schema());
  if (traits.replaces) return replace(op, remaining_keys, stack);
  // Some of these operators copy if necessary (contiguous, reshape, to): the operators that they call come here.
  if (traits.view) return op.redispatchBoxed(remaining_keys, stack);
  enter(param_uses);
  try {
    const c10::impl::ExcludeDispatchKeyGuard once(kKey);  // memory is attached for nested operators
    redispatch(op, remaining_keys, stack);
  } catch (...) {
    leave(param_uses, param_uses.size(), false);
    throw;
  }
  leave(param_uses, param_uses.size(), true);
}

}  // namespace

void run_with_memory(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto remaining_keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (recorder) return recorder->record(op, remaining_keys, stack);
  run(op, remaining_keys, stack);
}

void run_intercepted(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) {
  const OperatorRecorder::Pause pause;
  run(op, remaining_keys, stack);
}

void find_param_uses(const c10::OperatorHandle& op, const Stack& stack, std::vector<ParamUse>& param_uses) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool written = alias && alias->isWrite();
    for_each_tensor(stack[first + i], [&](const at::Tensor& tensor) { add(tensor, written, param_uses); });
  }
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite()) return false;
  for (const auto& result : schema.returns())
    if (!result.alias_info() || result.alias_info()->isWrite()) return false;
  return !schema.returns().empty();
}

OperatorRecorder::OperatorRecorder() : outer_(recorder) {
  ProcessSetup::intercept_placeholders();
  recorder = this;
  if (!outer_) c10::impl::tls_set_dispatch_key_included(kKey, true);
}
OperatorRecorder::~OperatorRecorder() {
  recorder = outer_;
  if (!outer_) c10::impl::tls_set_dispatch_key_included(kKey, false);
}

OperatorRecorder::Pause::Pause() : paused_(std::exchange(recorder, nullptr)) {}
OperatorRecorder::Pause::~Pause() { recorder = paused_; }

}  // namespace zr::host::model
