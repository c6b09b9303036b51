// Calls memory providers before and after operators that use storages without memory.
//
// Tensors on a placeholder carry the dispatch key DeferredInit, which libtorch leaves to external libraries; views
// inherit it, copies do not. Its only kernel in a process is run_with_memory(), for all operators: it finds the
// placeholders among an operator's arguments, lets their providers attach memory, runs the operator and lets the
// providers detach the memory. Operators without such an argument do not reach the fallback.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "model/placeholder.hpp"

namespace zr::host::model {

using Stack = std::vector<c10::IValue>;

/// Of placeholders and their views.
inline constexpr auto kPlaceholderKey = c10::DispatchKey::DeferredInit;
/// The kernel of kPlaceholderKey for all operators (process_setup.hpp). [any]
void run_with_memory(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

/// Appends each placeholder among the operator's arguments (the last elements of the stack) once.
void find_param_uses(const c10::OperatorHandle& op, const Stack& stack, std::vector<ParamUse>& param_uses);
/// Calls fn for each defined tensor of a value, also in lists.
template <class F>
void for_each_tensor(const c10::IValue& value, F&& fn) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) fn(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, fn);
  }
}
/// True if all results of the operator are views of its arguments and it writes nothing, so it uses no memory.
bool is_view(const c10::FunctionSchema& schema);

/// Runs an operator that no OperatorRecorder records: placeholders among its arguments have memory meanwhile.
/// `remaining_keys`: the keys to redispatch to.
void run_intercepted(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack);

/// While one exists, record() is called instead of each operator of this thread, also of those without tensors.
class OperatorRecorder {
 public:
  OperatorRecorder();
  virtual ~OperatorRecorder();
  OperatorRecorder(const OperatorRecorder&) = delete;
  /// Called instead of the operator: takes the arguments from the stack and pushes the results. `remaining_keys`: the
  /// keys to redispatch to.
  virtual void record(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) = 0;
  /// While it exists, operators of this thread are not recorded.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;

   private:
    OperatorRecorder* paused_;
  };

 protected:
  /// The one that this thread used before; null if there was none.
  const OperatorRecorder* outer() const { return outer_; }

 private:
  OperatorRecorder* outer_;
};

}  // namespace zr::host::model
