// Rank bodies of the checkpoint tests. The environment variable CHECKPOINT names the folder that a body saves to or
// loads from.
#pragma once

#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>

#include "support/checkpoint_test.hpp"

namespace zr::test {

using engine_tests::Run;

inline std::string checkpoint_folder() { return std::getenv("CHECKPOINT"); }

// Prints on rank 0.
inline void say(const Run& run, const std::string& text) {
  if (run.program.rank() == 0) std::cout << text << std::endl;
}

// The message of the exception that the call throws; empty if it throws nothing.
inline std::string thrown_by(const std::function<void()>& call) try {
  call();
  return "";
} catch (const std::exception& error) {
  return error.what();
}

// Loads a checkpoint and saves it to another folder without a step in between.
inline const RankBodyOf<Run> resaves("resaves", [](Run& run) {
  run.build(11);
  run.engine->load(checkpoint_folder());
  say(run, run.engine->save(checkpoint_folder() + "-again"));
});

// Prints the step and the hash of the weights.
inline const RankBodyOf<Run> prints_hash("prints_hash", [](Run& run) {
  run.build();
  const std::string hash = run.engine->weights_hash();
  say(run, "step " + std::to_string(run.engine->step_index()) + " hash " + hash);
});

}  // namespace zr::test
