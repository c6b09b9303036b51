// The program's model: what zr::Engine trains, as the program may change it later.
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

/// A module of libtorch, which outlives this, or a TorchScript module, which is shared. Training thread.
class ProgramModule {
 public:
  explicit ProgramModule(torch::nn::Module& module);
  explicit ProgramModule(const torch::jit::Module& module);
  /// Of now, in the module's order; a tied one under each of its names.
  Tensors parameters() const;
  Tensors buffers() const;
  /// The parameter of that name, which is found without listing those of other modules; empty if there is none.
  Tensors parameter(const std::string& name) const;

 private:
  torch::nn::Module* module_ = nullptr;
  std::shared_ptr<const torch::jit::Module> script_;
};

/// How `now` differs from the list of parameters that `model` trains, and `buffers` from its buffers.
host::ParameterChange parameter_change(const host::TorchModel& model, const Tensors& now, const Tensors& buffers);

}  // namespace zr
