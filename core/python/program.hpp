// The TorchBind class Program.
#pragma once

#include <torch/custom_class.h>

#include "zr/program.hpp"

namespace zr::python {

/// A zr::Program. Any thread.
struct ProgramHolder : torch::CustomClassHolder {
  explicit ProgramHolder(zr::Program made) : program(std::move(made)) {}
  const zr::Program program;
};

}  // namespace zr::python
