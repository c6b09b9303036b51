// The run of one rank in the engine tests: its configuration, model and engine.
#pragma once

#include <torch/torch.h>

#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "multirank/parity/models.hpp"
#include "zr/engine.hpp"

namespace engine_tests {

struct Run {
  Run(const std::string& toml, const std::vector<std::string>& overrides)
      : program(toml, overrides,
                {{"parity.model", "everything", "which model"},
                 {"parity.weighted", false, "unused here"},
                 {"parity.overflows", false, "the losses of every other step are infinite, from the first on"}}) {
    arguments.push_back(toml);
    arguments.insert(arguments.end(), overrides.begin(), overrides.end());
  }
  std::vector<std::string> arguments;
  zr::Program program;
  std::shared_ptr<parity::Model> model;
  std::unique_ptr<zr::Engine> engine;
  // Makes the model of parity.model, and its engine.
  void build(uint64_t seed = 7);
  void micro_step() {
    const bool overflows = program.boolean("parity.overflows") && engine->step_index() % 2 == 0;
    const auto loss = model->loss(engine->step_index(), engine->micro_index());
    engine->backward(overflows ? loss * std::numeric_limits<float>::infinity() : loss);
    engine->step();
  }
  void train() {
    while (!engine->done()) micro_step();
  }
};

inline bool same(const torch::Tensor& a, const torch::Tensor& b) { return torch::equal(a, b); }

}  // namespace engine_tests
