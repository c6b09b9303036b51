// The program's model as zr::Engine sees it: its current parameters and buffers, which the program may change later.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/refresh_state.hpp"
#include "model/torch_model.hpp"

namespace torch::jit {
struct Module;
}

namespace zr {

using Tensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// A torch::nn::Module, which must outlive this object, or a TorchScript module, which it shares. Training thread only.
class ProgramModule {
 public:
  explicit ProgramModule(torch::nn::Module& module);
  explicit ProgramModule(const torch::jit::Module& module);
  /// The current parameters and buffers, in the module's order; a tied parameter appears under each of its names.
  Tensors parameters() const;
  Tensors buffers() const;
  /// The parameter of that name, or an empty list. Does not list the parameters of other submodules.
  Tensors parameter(const std::string& name) const;

 private:
  torch::nn::Module* module_ = nullptr;
  std::shared_ptr<const torch::jit::Module> script_;
};

/// The differences between `current` and the parameters that `model` trains, and between `buffers` and its buffers.
host::engine::ParameterChange parameter_change(const host::model::TorchModel& model, const Tensors& current,
                                               const Tensors& buffers);

}  // namespace zr
