// Tensors of a 16-bit model with another floating-point type, and errors of operators that do not accept the mix.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <string>
#include <vector>

namespace zr::host::model {

/// The buffers of one model that have another floating-point type than its weights (train.cast_buffers), and the
/// parameters that keep fp32 (train.keep_fp32). While the object exists, operators on them and on their views are
/// intercepted: if one fails because of its arguments' types, the error names the tensor and the key. Results of
/// operators are not intercepted. Training thread; the static functions: any thread.
class KeptTensors {
 public:
  KeptTensors() = default;
  ~KeptTensors() { clear(); }
  KeptTensors(const KeptTensors&) = delete;

  /// Adds a buffer or a parameter. dtype: of the weights, as in train.dtype.
  void add(const std::string& name, const at::Tensor& tensor, const std::string& dtype, bool is_parameter = false);
  void clear();

  /// False if the process has no kept tensor: then there is nothing to describe.
  static bool any() { return storages_added.load(std::memory_order_relaxed) > 0; }
  /// The storages of intercepted tensors among an operator's arguments (the last elements of the stack).
  using Storages = c10::SmallVector<const c10::StorageImpl*, 4>;
  static Storages used(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack);
  /// A clause about the kept tensors on these storages, with the remedy; "" without any.
  static std::string describe(const Storages& storages);
  /// A clause about all kept tensors of the process, with the remedy.
  static std::string describe_all();
  /// True for the text of an error about the types of an operator's arguments.
  static bool is_type_error(const std::string& message);

 private:
  std::vector<const c10::StorageImpl*> storages_;  // when they were added; only used as keys
  std::vector<at::Tensor> marked_;                 // those of them that were not intercepted before
  static inline std::atomic<int> storages_added{0};
};

}  // namespace zr::host::model
