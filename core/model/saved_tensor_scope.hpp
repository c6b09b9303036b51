// Replaces how autograd keeps the tensors that forward saves for backward.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/types.h>

#include <functional>
#include <memory>

namespace zr::host::model {

using SavedHooks = torch::autograd::SavedVariableHooks;

/// True for parameters and views of sharded parameters: keeping them needs no extra memory.
bool is_free_to_save(const torch::Tensor& tensor);
/// How often the tensor was changed in place.
int64_t version_of(const torch::Tensor& tensor);

/// While one exists, each tensor that an operator of this thread saves for backward is packed by hooks from make(), and
/// unpacked by them. Scopes nest and may end in any order; the innermost is used. A scope calls
/// ProcessSetup::begin_backward_here().
class SavedTensorScope {
 public:
  using Make = std::function<std::unique_ptr<SavedHooks>()>;
  /// `yields`: hooks that other code of the process has set are used instead, such as those of a Python program.
  explicit SavedTensorScope(Make make, bool yields = false);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  /// True without a scope on this thread, or if the innermost yields.
  static bool yields();
  /// Hooks from the innermost scope of this thread; null without a scope.
  static std::unique_ptr<SavedHooks> hooks();

 private:
  Make make_;
  const bool yields_;
  SavedTensorScope* outer_;
};

}  // namespace zr::host::model
