// The version counter of a tensor at one time: tells later whether the tensor was changed in place since then.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zr::host::model {

/// The sizes of a tensor; of a nested tensor, which has none, the number of its elements.
std::vector<int64_t> sizes_of(const torch::Tensor& tensor);

/// Keeps the version counter alive, not the tensor's memory. An inference tensor has no counter and never counts as
/// changed.
class TensorVersion {
 public:
  TensorVersion() = default;
  /// The version that the defined tensor has now.
  explicit TensorVersion(const torch::Tensor& tensor);

  /// The version that the tensor has now.
  TensorVersion now() const;
  bool is_current() const { return number(counter_) == number_; }
  /// Sets the counter of the tensor and its views back to this version.
  void restore() const;
  /// Identity of the counter, which the tensor shares with its views and detach(), not with data(). Null if none.
  const void* counter() const { return identity(counter_); }
  /// Of sizes_of().
  const std::vector<int64_t>& sizes() const { return sizes_; }
  /// "a tensor [6, 8]" or "a parameter [6, 8]", for messages.
  std::string tensor() const;
  /// Throws UserError if the tensor, which an operator of forward saved then, has been changed since.
  void check_saved() const;

  /// Identity and number of a counter.
  static const void* identity(const c10::VariableVersion& counter);
  static int64_t number(const c10::VariableVersion& counter);

 private:
  c10::VariableVersion counter_;
  int64_t number_ = 0;
  bool parameter_ = false;
  std::vector<int64_t> sizes_;
};

}  // namespace zr::host::model
