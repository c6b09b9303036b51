// One operator of a constructor that zr::deferred records.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/recorded_random.hpp"
#include "model/stack_tensors.hpp"

namespace zr::host::model {

/// An operator, or a write through a pointer.
struct RecordedOperator {
  std::optional<c10::OperatorHandle> op;
  Stack arguments;                            // tensors are snapshots: they keep the shapes of the call
  std::vector<at::Tensor> results;            // one per tensor of the result; undefined if it is an argument
  std::optional<RandomUse> random;            // if the operator draws random numbers
  at::ScalarType default_dtype = at::kFloat;  // torch::get_default_dtype() at the call
  int threads = 0;                            // at::get_num_threads() at the call
  std::shared_ptr<const std::string> bytes;   // without op: the values of results[0]'s storage

  /// Calls fn(tensor) for each argument and each result.
  template <class F>
  void for_each(F&& fn) const {
    for_each_tensor(arguments, arguments.size(), [&](const at::Tensor& tensor, std::size_t) { fn(tensor); });
    for (const at::Tensor& tensor : results)
      if (tensor.defined()) fn(tensor);
  }
  /// "aten::normal_", for messages.
  std::string name() const { return op ? op->schema().name() : "a write through a pointer"; }
};

}  // namespace zr::host::model
