// Shared by the rank programs of the engine tests: a configuration with a model and an Engine, and the check function.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "multirank/parity/models.hpp"
#include "zr/engine.hpp"

namespace engine_tests {

inline int wrong = 0;  // 1 once a check has failed
inline void require(bool holds, const std::string& what) {
  if (holds) return;
  std::cerr << "check failed: " << what << std::endl;
  wrong = 1;
}

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
  void build(uint64_t seed = 7) {
    model = parity::make(program.text("parity.model"), seed);
    engine = std::make_unique<zr::Engine>(program, *model);
  }
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

using Cases = std::map<std::string, std::function<void(Run&)>>;

/// Runs PROGRAM CASE TOML [path=value ...]. Returns 0, 1 if a check failed, 2 for an unknown case or missing arguments,
/// or the code of zr::guarded().
inline int run_case(int argc, char** argv, const Cases& cases) {
  if (argc < 3 || !cases.count(argv[1])) return 2;
  const int code = zr::guarded([&] {
    Run run(argv[2], {argv + 3, argv + argc});
    cases.at(argv[1])(run);
  });
  return code ? code : wrong;
}

}  // namespace engine_tests
