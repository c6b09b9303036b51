#include "support/train_bodies.hpp"

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace engine_tests {

void Run::build(uint64_t seed) {
  model = parity::make(program.text("parity.model"), seed);
  engine = std::make_unique<zr::Engine>(program, *model);
  parity::device = engine->device();
}

namespace {

void train(Run& run) {
  run.build();
  run.train();
}

void train_list(Run& run) {
  std::ifstream list(std::getenv("TRAINS_LIST"));
  for (std::string line; std::getline(list, line);) {
    std::istringstream words(line);
    std::vector<std::string> overrides(run.arguments.begin() + 1, run.arguments.end());
    for (std::string word; words >> word;) overrides.push_back(word);
    Run next(run.arguments[0], overrides);
    train(next);
  }
}

}  // namespace

const zr::test::RankBodyOf<Run> trains("trains", train);
const zr::test::RankBodyOf<Run> trains_list("trains_list", train_list);

}  // namespace engine_tests
