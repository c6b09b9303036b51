// The tensors that a block uses and that it did not make: inputs, captured tensors, parameters, buffers.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/operator_observer.hpp"
#include "model/reads_again.hpp"
#include "model/tensor_memory.hpp"
#include "model/tensor_version.hpp"

namespace zr::host::model {

/// Made while the block runs for the first time, from the calls of an observer. Later it tells whether the block would
/// read the same values again, and gives back those that the block itself has changed: it keeps a copy of a tensor
/// without gradient, such as a buffer, from before the first change. The methods for the first run must not throw: a
/// block that cannot run again is reported by check().
class OutsideTensors {
 public:
  explicit OutsideTensors(const std::vector<torch::Tensor>& inputs);

  /// Called before each operator of the first run.
  void begins(const OperatorCall& call);
  /// Called after each operator of the block with its results.
  void ended(const std::vector<c10::IValue>& results);
  /// The first run is over: forgets the tensors that the block made.
  void end();

  /// Throws UserError if the block cannot run again: a tensor that it reads was changed after the first run, or the
  /// block changed one that cannot be given back.
  void check() const;

  /// The memories that the first run met. After end().
  const MetMemories& met() const { return met_; }

  /// An operator of the first run ran under autocast with a cache.
  bool met_cast_cache() const { return met_cast_cache_; }

  /// While it exists, the tensors have the values that the first run met. Afterwards they have those from before it,
  /// and the block's second run has left no hooks on them.
  class Restored {
   public:
    explicit Restored(const OutsideTensors& outside);
    ~Restored();
    Restored(const Restored&) = delete;
    /// After the second run. Throws UserError if it did not change the tensors as often as the first run.
    void check() const;

   private:
    struct Before {
      c10::Storage storage;
      torch::Tensor bytes;
      TensorVersion version;
    };
    const OutsideTensors& outside_;
    std::vector<Before> before_;         // of the tensors in `changed_` that still exist
    std::vector<TensorLayout> layouts_;  // of `layouts_` of OutsideTensors
    std::vector<std::pair<std::shared_ptr<torch::autograd::hooks_list>, std::size_t>> hooks_;  // and their number
  };

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Used {
    TensorVersion version;
    bool input = false;
    bool parameter = false;
    bool copied = false;     // in `changed_`, so its present value does not matter
    bool gradients = false;  // also got gradients by the change
  };
  struct Changed {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    torch::Tensor bytes;    // before the change
    TensorVersion version;  // before the change
    TensorVersion end;      // at the end of the first run
    std::size_t nbytes;     // at the end of the first run
  };

  void sees(const torch::Tensor& tensor, const OperatorCall& call, bool written);
  void meets(const torch::Tensor& tensor, bool own);
  void keep_hooks(const torch::Tensor& tensor);
  void keep_layout(const torch::Tensor& tensor);
  void changes(const torch::Tensor& tensor, Used& used, const OperatorCall& call);
  void end_changes();
  void check_cast(const OperatorCall& call);
  void refuse(const std::string& reason);
  void refuse_change(const Used& used, const std::string& reason);

  std::unordered_map<const void*, Used> used_;            // outside, by identity of the version counter
  ska::flat_hash_map<const void*, MetMemory> first_met_;  // during the first run
  MetMemories met_;                                       // afterwards
  std::vector<Changed> changed_;                          // in the order of the changes
  std::vector<TensorLayout> layouts_;                     // before their changes, in this order
  std::unordered_map<const c10::TensorImpl*, WeakTensor>
      with_hooks_;  // tensors that require gradients, whose hooks outlive the block's graph
  std::string refusal_;
  // Under autocast: the operator of the program that is running, its arguments, and the casts that the block has made.
  bool autocast_ = false, met_cast_cache_ = false;
  const char* outer_name_ = nullptr;
  std::vector<torch::Tensor> outer_arguments_;
  std::unordered_map<const void*, TensorVersion> casts_;
};

}  // namespace zr::host::model
