// One rank of model_test: what a program may do with its model outside the engine.
//   model_case CASE TOML [path=value ...]
#include "multirank/model_run.hpp"

int main(int argc, char** argv) {
  engine_tests::Cases all = model_tests::alias_cases();
  all.insert(model_tests::pointer_cases().begin(), model_tests::pointer_cases().end());
  all.insert(model_tests::refresh_cases().begin(), model_tests::refresh_cases().end());
  all.insert(model_tests::tiers_cases().begin(), model_tests::tiers_cases().end());
  return engine_tests::run_case(argc, argv, all);
}
