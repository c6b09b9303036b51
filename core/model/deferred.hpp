// Models that are built without ever being whole: their constructors' operators are recorded, and run later, one
// parameter in memory at a time.
#pragma once

#include <ATen/core/Generator.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "model/intercept.hpp"
#include "model/model.hpp"

namespace zr::host {

/// What a constructor did. Every tensor it makes is a placeholder of this; operators on placeholders are recorded,
/// views of them are made at once. On the thread that builds.
class Construction final : public MemoryProvider, public std::enable_shared_from_this<Construction> {
 public:
  /// Records this thread's operators while it lives.
  class Scope final : public Recorder {
   public:
    Scope();
    void record(const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack* stack) override;

   private:
    std::shared_ptr<Construction> construction_;
  };
  /// The one a tensor waits for; null for an ordinary tensor.
  static std::shared_ptr<Construction> of(const at::Tensor& tensor);

  /// Operators recorded: equal on ranks that build the same model.
  std::size_t size() const { return steps_.size(); }
  /// Runs what was recorded, in its order and with its random state where `computes`, and makes every other tensor
  /// real. param_of: the number of a parameter by its storage. A parameter has memory while operators in a row touch
  /// it, then load.store takes it over. Forgets all.
  using Storages = std::unordered_map<const c10::StorageImpl*, uint32_t>;
  void replay(const Storages& param_of, const Model::ConstructMemory& load, bool computes);

  /// Operators outside the scope: refused.
  void enter(const ParamUse* param_uses, std::size_t n) override;
  void leave(const ParamUse*, std::size_t, bool) override {}
  std::string alternative() const override;

 private:
  struct Step {
    c10::OperatorHandle op;
    Stack arguments;
    std::vector<at::Tensor> results;   // new tensors
    std::optional<at::Tensor> random;  // set before: the state was changed otherwise than by these operators
  };
  class Replay;
  // A new tensor of that shape.
  at::Tensor placeholder(const at::Tensor& like);
  // Puts results of the right shapes in the place of the arguments.
  void infer(const c10::OperatorHandle& op, Stack* stack, std::vector<at::Tensor>& results);
  // Copies what is not deferred among the arguments.
  static void keep_inputs(const c10::OperatorHandle& op, Stack& arguments);
  // Records an operator, or runs it where it touches no placeholder's memory.
  void add(const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack* stack);

  std::vector<Step> steps_;
  at::Tensor random_;  // when last looked at
  uint32_t made_ = 0;
};

}  // namespace zr::host
