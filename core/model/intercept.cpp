#include "model/intercept.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/failure.hpp"

namespace zr::host {

namespace {
constexpr auto kKey = c10::DispatchKey::DeferredInit;
thread_local Recorder* recorder = nullptr;

void add(const at::Tensor& tensor, bool written, std::vector<Touch>& touches) {
  Placeholder* placeholder = Placeholder::behind(tensor);
  if (!placeholder) return;
  for (Touch& touch : touches)
    if (touch.placeholder == placeholder) {
      touch.written |= written;
      return;
    }
  touches.push_back({placeholder, written});
}

void add(const c10::IValue& value, bool written, std::vector<Touch>& touches) {
  if (value.isTensor()) {
    add(value.toTensor(), written, touches);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor, written, touches);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      if (tensor) add(*tensor, written, touches);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) add(one, written, touches);
  }
}

// What must be known of an operator at each call.
struct Traits {
  bool view;
  bool replaces;  // exchanges a tensor's storage; Module::to asks the last of these before it does so
};
const Traits& traits_of(const c10::FunctionSchema& schema) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Traits> known;
  const auto at = known.find(&schema);
  if (at != known.end()) return at->second;
  static const std::set<std::string> replacing{"aten::set_", "aten::resize_", "aten::resize_as_",
                                               "aten::_has_compatible_shallow_copy_type"};
  return known.emplace(&schema, Traits{is_view(schema), replacing.count(schema.name()) > 0}).first->second;
}

// An operator that exchanges the storage of a placeholder's tensor. Within a scope set_(source), which torch::load()
// calls, copies the source's values instead; all else is an error.
void replace(const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack* stack) {
  const std::size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor self = (*stack)[first].toTensor();
  const Placeholder* placeholder = Placeholder::behind(self);
  if (!placeholder || !placeholder->keeper()) return op.redispatchBoxed(below, stack);
  if (op.schema().name() != "aten::set_" || op.schema().overload_name() != "source_Tensor" ||
      !placeholder->keeper()->in_scope(*placeholder))
    fail_user(placeholder->reason() + "; to replace its data, " + placeholder->keeper()->instead());
  const at::Tensor source = (*stack)[first + 1].toTensor();
  if (source.sizes() != self.sizes())
    fail_user("cannot load a tensor of " + std::to_string(source.numel()) + " elements and " +
              std::to_string(source.dim()) + " dimensions into a parameter of " + std::to_string(self.numel()) +
              " and " + std::to_string(self.dim()) + ": " + placeholder->reason());
  self.copy_(source);  // comes here again
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(self);
}

// Calls each keeper for its own touches, which stand side by side; `n` of them in all.
template <class F>
void by_keeper(const std::vector<Touch>& touches, std::size_t n, F&& call) {
  for (std::size_t first = 0; first < n;) {
    Keeper* keeper = touches[first].placeholder->keeper();
    std::size_t end = first + 1;
    while (end < n && touches[end].placeholder->keeper() == keeper) ++end;
    call(keeper, touches.data() + first, end - first);
    first = end;
  }
}

void leave(const std::vector<Touch>& touches, std::size_t n, bool done) {
  by_keeper(touches, n, [&](Keeper* keeper, const Touch* first, std::size_t count) {
    if (keeper) keeper->leave(first, count, done);
  });
}

void enter(std::vector<Touch>& touches) {
  std::stable_sort(touches.begin(), touches.end(), [](const Touch& a, const Touch& b) {
    return std::less<>()(a.placeholder->keeper(), b.placeholder->keeper());
  });
  std::size_t entered = 0;
  try {
    by_keeper(touches, touches.size(), [&](Keeper* keeper, const Touch* first, std::size_t count) {
      if (!keeper) fail_user(first->placeholder->reason());
      keeper->enter(first, count);
      entered += count;
    });
  } catch (...) {
    leave(touches, entered, false);
    throw;
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (recorder) return recorder->record(op, below, stack);
  std::vector<Touch> touches;
  find_touches(op, *stack, touches);
  if (touches.empty()) return op.redispatchBoxed(below, stack);
  const Traits& traits = traits_of(op.schema());
  if (traits.replaces) return replace(op, below, stack);
  // Some `views` copy when they must (contiguous, reshape, to): what they call comes here again.
  if (traits.view) return op.redispatchBoxed(below, stack);
  enter(touches);
  try {
    const c10::impl::ExcludeDispatchKeyGuard once(kKey);  // nested operators have the memory already
    op.redispatchBoxed(below, stack);
  } catch (...) {
    leave(touches, touches.size(), false);
    throw;
  }
  leave(touches, touches.size(), true);
}

}  // namespace

void find_touches(const c10::OperatorHandle& op, const Stack& stack, std::vector<Touch>& touches) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    add(stack[first + i], alias && alias->isWrite(), touches);
  }
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.alias_info() && argument.alias_info()->isWrite()) return false;
  for (const auto& result : schema.returns())
    if (!result.alias_info() || result.alias_info()->isWrite()) return false;
  return !schema.returns().empty();
}

void intercept() {
  static const torch::Library library = [] {
    torch::Library fallbacks(torch::Library::IMPL, "_", kKey, "core/model/intercept.cpp", __LINE__);
    fallbacks.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return fallbacks;
  }();
}

Recorder::Recorder() : outer_(recorder) {
  intercept();
  recorder = this;
  if (!outer_) c10::impl::tls_set_dispatch_key_included(kKey, true);
}
Recorder::~Recorder() {
  recorder = outer_;
  if (!outer_) c10::impl::tls_set_dispatch_key_included(kKey, false);
}

}  // namespace zr::host
