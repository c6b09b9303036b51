// What autograd saves in forward for backward, put aside until backward asks for it.
#pragma once

#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/model.hpp"
#include "model/saved_tensor_scope.hpp"

namespace zr::host {

/// While one lives, what operators of this thread save is put aside: the whole storage behind it, once for all views of
/// it and all operators, as long as it is not changed. What stays: parameters, buffers of the model, memory that is not
/// libtorch's, storages below OffloadCallbacks::least_bytes, and what outlived a backward before. What comes back has
/// the same sizes, strides and bits, on a storage that all who ask at the time share. As without it, backward refuses
/// what was changed in place after it was saved.
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
};

}  // namespace zr::host
