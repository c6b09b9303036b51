// The program's model as zr::Engine sees it: its current parameters and buffers, which the program may change later.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/refresh_state.hpp"
#include "model/torch_model.hpp"
#include "zr/engine.hpp"

namespace torch::jit {
struct Module;
}

namespace zr {

using Tensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// One implementation for each kind of module. Training thread only.
class ProgramModule {
 public:
  virtual ~ProgramModule() = default;
  /// The current parameters and buffers, in the module's order; a tied parameter appears under each of its names.
  virtual Tensors parameters() const = 0;
  virtual Tensors buffers() const = 0;
  /// The parameter of that name, or an empty list. Does not list the parameters of other submodules.
  virtual Tensors parameter(const std::string& name) const = 0;
};
/// Never null; several engines' states may share one.
using ProgramModulePtr = std::shared_ptr<const ProgramModule>;

/// A torch::nn::Module, which must outlive the result.
ProgramModulePtr program_module(const torch::nn::Module& module);
/// A TorchScript module, which the result shares.
ProgramModulePtr program_module(const torch::jit::Module& module);

/// The tensors that `list` returns. Throws UserError for an empty name, one that checkpoints cannot have, and one that
/// two tensors have; an exception of `list` as ProgramException.
ProgramModulePtr program_module(std::function<ModelTensors()> list);

/// The differences between `current` and the parameters that `model` trains, and between `buffers` and its buffers.
host::engine::ParameterChange parameter_change(const host::model::TorchModel& model, const Tensors& current,
                                               const Tensors& buffers);

}  // namespace zr
