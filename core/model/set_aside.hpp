// What autograd saves in forward for backward, put aside until backward asks for it.
#pragma once

#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/model.hpp"
#include "model/saved.hpp"

namespace zr::host {

/// While one lives, what operators of this thread save is put aside: the whole storage behind it, once for all views of
/// it and all operators, as long as it is not changed. What stays: parameters, buffers of the model, memory that is not
/// libtorch's, storages below Aside::least_bytes, and what outlived a backward before. What comes back has the same
/// sizes, strides and bits, on a storage that all who ask at the time share. As without it, backward refuses what was
/// changed in place after it was saved.
class SetAside {
 public:
  using Buffers = std::vector<std::pair<std::string, torch::Tensor>>;
  SetAside(Model::Aside aside, const Buffers& buffers);
  ~SetAside();
  SetAside(const SetAside&) = delete;

 private:
  struct Shared;
  struct Record;
  class Hooks;
  std::shared_ptr<Shared> shared_;
  SavedScope scope_;
};

}  // namespace zr::host
