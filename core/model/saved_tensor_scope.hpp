// What autograd keeps of a forward for its backward, kept in another way: the saved-tensor engine.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/types.h>

#include <functional>
#include <memory>

namespace zr::host {

using SavedHooks = torch::autograd::SavedVariableHooks;

/// Parameters, and views of sharded ones, cost nothing to keep.
bool is_free_to_save(const torch::Tensor& tensor);
/// How often it was changed in place.
int64_t version_of(const torch::Tensor& tensor);

/// While one lives, every tensor that an operator of this thread saves for backward is packed into what make() returns,
/// and comes back from it. Scopes nest, and may end in another order; the innermost counts. The first in a process
/// replaces libtorch's default autograd engine by one that differs in this alone, so no backward may run on another
/// thread then.
class SavedTensorScope {
 public:
  using Make = std::function<std::unique_ptr<SavedHooks>()>;
  explicit SavedTensorScope(Make make);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  /// From this thread's innermost scope; null without one.
  static std::unique_ptr<SavedHooks> hooks();

 private:
  Make make_;
  SavedTensorScope* outer_;
};

}  // namespace zr::host
