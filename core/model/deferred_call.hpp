// One call of an operator that Construction records. Only deferred_*.cpp include it.
#pragma once

#include <string>

#include "model/deferred.hpp"

namespace zr::host::model {

struct Construction::Traits {
  /// Reads the operator's schema and tags.
  explicit Traits(const c10::OperatorHandle& op);
  /// Computed once per operator and thread.
  static const Traits& of(const c10::OperatorHandle& op);

  bool view;           // all results are views of arguments, and it writes nothing
  bool metadata;       // changes the shape or storage of its first argument, no values
  bool writes;         // to an argument
  bool makes_tensors;  // has tensors among its results
  bool composite;      // calls other operators, which are recorded instead
  bool empty;          // makes a tensor without values
};

struct Construction::Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;  // to redispatch to
  Stack* stack;
  const Traits& traits = Traits::of(op);
  std::size_t count = op.schema().arguments().size();

  void redispatch() const { op.redispatchBoxed(keys, stack); }
  const c10::IValue& argument(std::size_t i) const { return (*stack)[stack->size() - count + i]; }
  /// True if the operator writes to argument i.
  bool writes(std::size_t i) const {
    const auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  /// Calls fn(tensor, i) for each tensor among the arguments; i: the index of its argument.
  template <class F>
  void for_each(F&& fn) const {
    for_each_tensor(*stack, count, fn);
  }
  const std::string& name() const { return op.schema().name(); }
};

/// Throws what libtorch throws before it writes to the tensor: for a leaf of autograd that requires a gradient.
void check_leaf(const at::Tensor& tensor);

}  // namespace zr::host::model
