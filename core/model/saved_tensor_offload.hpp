// Offloads tensors that autograd saves for backward until backward needs them.
#pragma once

#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/model.hpp"
#include "model/operator_observer.hpp"
#include "model/saved_tensor_scope.hpp"

namespace zr::host::model {

/// While one exists, offloads the tensors that operators of this thread save: the full storage of each, once for all
/// its views and all operators, as long as its contents do not change. Not offloaded: parameters, buffers of the model,
/// memory that libtorch did not allocate, storages smaller than OffloadCallbacks::min_bytes, storages that outlived an
/// earlier backward, and what an operator saves that then fills one of its arguments (rrelu). A restored tensor has the
/// same sizes, strides and bits; users at the same time share its storage. As without offloading, backward throws if a
/// tensor was changed in place after it was saved.
class SavedTensorOffload {
 public:
  using Buffers = std::vector<std::pair<std::string, torch::Tensor>>;
  SavedTensorOffload(Model::OffloadCallbacks callbacks, const Buffers& buffers);
  ~SavedTensorOffload();
  SavedTensorOffload(const SavedTensorOffload&) = delete;

 private:
  struct Shared;
  struct Record;
  class Hooks;
  std::shared_ptr<Shared> shared_;
  SavedTensorScope scope_;
  FillingOperators filling_;
};

}  // namespace zr::host::model
