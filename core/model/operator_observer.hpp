// Calls an object before and after each operator that this thread runs.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/types.h>

#include <vector>

namespace zr::host::model {

/// Properties of an operator that every call has.
struct ObservedOperator {
  std::size_t arguments = 0;
  std::vector<bool> writes;  // per argument: the operator changes this tensor
  bool draws = false;        // draws random numbers, unless one of the next two arguments says that it does not
  int probability = -1;      // the argument that is 0 if the operator drops nothing; -1: none
  int training = -1;         // the argument that is false outside training; -1: none
  bool statistics = false;   // in training, also changes the arguments running_mean and running_var
  bool fills = false;        // fills an argument that is not its first: autograd saves that before it is filled
  bool casts = false;        // aten::to and aten::_to_copy
  bool reshapes = false;     // may change the sizes, strides or storage of a tensor that it writes
  const char* name = nullptr;
};

/// One call of an operator.
struct OperatorCall {
  const ObservedOperator& traits;
  c10::ArrayRef<const c10::IValue> arguments;
  int depth;  // 1: called by the program; 2: called by such an operator; ...
  /// False if an argument says that the operator is used outside training.
  bool in_training() const;
  /// The call draws random numbers.
  bool draws() const;
  /// The call changes the argument.
  bool writes(std::size_t argument) const;
};

/// Calls fn(tensor) for each defined tensor in the value: a tensor, or lists of them.
template <class Fn>
void each_tensor(const c10::IValue& value, const Fn& fn) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) fn(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) each_tensor(element, fn);
  }
}

/// While one exists, it is called for the operators of the thread that made it. Observers nest, and end in reverse
/// order; each is called for the operators that run while it exists.
class OperatorObserver {
 public:
  OperatorObserver(const OperatorObserver&) = delete;
  virtual ~OperatorObserver();
  /// Called before the operator. Operators that it runs itself are not observed. It must not throw.
  virtual void begins(const OperatorCall& call) = 0;
  /// Called after the operator with its results, for operators at depth 1; not if it threw. It must not throw.
  virtual void ended(const std::vector<c10::IValue>& results) = 0;

 protected:
  OperatorObserver();

 private:
  struct Callbacks;
  OperatorObserver* outer_;
  at::CallbackHandle handle_ = 0;  // of the outermost observer
  int depth_;                      // operators of this thread that were running when it was made
};

/// While one exists, running() is known on the thread that made it. It must end there.
class FillingOperators {
 public:
  FillingOperators();
  ~FillingOperators();
  FillingOperators(const FillingOperators&) = delete;
  /// An operator that is running on this thread fills one of its arguments (rrelu_with_noise): what autograd saves of
  /// its arguments may not have its values yet.
  static bool running();

 private:
  at::CallbackHandle handle_;
};

}  // namespace zr::host::model
