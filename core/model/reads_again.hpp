// The tensors from outside that a block uses when it runs again.
#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/types.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "model/operator_observer.hpp"
#include "model/tensor_memory.hpp"
#include "model/tensor_version.hpp"

namespace zr::host::model {

/// The memory of a tensor that the first run of a block met, and which exists after it.
struct MetMemory {
  WeakMemory memory;
  bool own;  // the block made it
};
using MetMemories = std::unordered_map<const void*, MetMemory>;  // by identity of the memory

/// Exists while a block runs again, on its thread. Detects that the run continues from what the first run left in
/// variables of the program, or that the program assigned other tensors to them. A tensor that the first run made may
/// be read again if the block does not replace it: then it is a cache.
class ReadsAgain final : private OperatorObserver {
 public:
  ReadsAgain(const MetMemories& first, const std::vector<torch::Tensor>& inputs);
  /// After the run, whose results exist no longer, but what it `saved`: an error message if the block used other
  /// tensors than in its first run, or an empty text.
  std::string fault(const std::vector<torch::Tensor>& saved) const;

 private:
  // A tensor that the first run did not use, or that it made.
  struct Suspect {
    WeakMemory memory;
    TensorVersion tensor;
    at::ScalarType dtype;
    bool own;        // the first run made it
    bool temporary;  // may be one that the block made without an operator: from a number or by from_blob
  };
  struct Made {
    WeakMemory memory;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };
  void begins(const OperatorCall& call) override;
  void ended(const std::vector<c10::IValue>& results) override;
  void sees(const torch::Tensor& tensor);

  const MetMemories& first_;
  // Memory of the inputs and of suspects, and of what this run made (true). By address: what exists since before this
  // run keeps its own.
  ska::flat_hash_map<const void*, bool> known_;
  std::vector<Suspect> suspects_;
  std::vector<Made> made_;  // after the first suspect
};

}  // namespace zr::host::model
