// Builds models that are never in memory as a whole: records the operators of their constructors and runs them later,
// with one parameter in memory at a time.
#pragma once

#include <ATen/core/Generator.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "model/intercept.hpp"
#include "model/model.hpp"

namespace zr::host::model {

/// The recorded operators of a constructor. This class is the provider of every tensor that the constructor makes, a
/// placeholder. Operators on placeholders are recorded; views of them are created at once. Used on the thread that
/// builds the model.
class Construction final : public MemoryProvider, public std::enable_shared_from_this<Construction> {
 public:
  /// Records the operators of this thread during its lifetime.
  class RecordingScope final : public OperatorRecorder {
   public:
    RecordingScope();
    void record(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack) override;

   private:
    std::shared_ptr<Construction> construction_;
  };
  /// The construction that will give the tensor its values; null for an ordinary tensor.
  static std::shared_ptr<Construction> of(const at::Tensor& tensor);

  /// Number of recorded operators: equal on ranks that build the same model.
  std::size_t size() const { return steps_.size(); }
  /// If `runs_operators`, runs the recorded operators in their order and with their random state. Gives memory to all
  /// tensors that are not parameters. param_of: the index of a parameter by its storage. A parameter has memory while
  /// consecutive operators use it; then load.store() takes its values over. Clears the record.
  using Storages = std::unordered_map<const c10::StorageImpl*, uint32_t>;
  void replay(const Storages& param_of, const Model::ConstructMemory& load, bool runs_operators);

  /// Called for operators outside the scope; throws UserError.
  void enter(const ParamUse* param_uses, std::size_t n) override;
  void leave(const ParamUse*, std::size_t, bool) override {}
  std::string remedy() const override;

 private:
  struct Step {
    c10::OperatorHandle op;
    Stack arguments;
    std::vector<at::Tensor> results;   // new tensors
    std::optional<at::Tensor> random;  // state to restore first, if other code changed it between two steps
  };
  class Replay;
  // A new placeholder with the shape, strides and type of `like`.
  at::Tensor placeholder(const at::Tensor& like);
  // Replaces the arguments on the stack by results of the right shapes.
  void infer(const c10::OperatorHandle& op, Stack* stack, std::vector<at::Tensor>& results);
  // Replaces ordinary tensors among the arguments by copies.
  static void keep_inputs(const c10::OperatorHandle& op, Stack& arguments);
  // Records an operator, or runs it if it uses no placeholder's memory.
  void add(const c10::OperatorHandle& op, c10::DispatchKeySet remaining_keys, Stack* stack);

  std::vector<Step> steps_;
  at::Tensor random_;  // random state when the last operator was recorded
  uint32_t placeholder_count_ = 0;
};

}  // namespace zr::host::model
