// One rank of the tests of tiers: runs the case named on the command line, prints what is wrong and exits 1, or exits
// 0.
//   offload_case CASE TOML [path=value ...]
#include <cstdlib>
#include <fstream>

#include "multirank/engine_run.hpp"

namespace {

using engine_tests::require;
using engine_tests::Run;

// Bytes, of this process: "VmRSS", "VmHWM".
int64_t held(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(field + ":", 0) == 0) return std::atoll(line.c_str() + field.size() + 1) * 1024;
  return -1;
}

// The model takes memory of its own for its weights when the engine ends: no more than the engine has given back.
void ends(Run& run) {
  run.build();
  run.train();
  int64_t weights = 0;
  for (const auto& parameter : run.model->parameters()) weights += static_cast<int64_t>(parameter.nbytes());
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
  const int64_t before = held("VmRSS");
  require(held("VmHWM") < before + weights / 8, "a process can forget its peak");
  run.engine.reset();
  const int64_t more = held("VmHWM") - before;
  std::cout << "the end took " << more << " bytes more, weights are " << weights << std::endl;
  require(more < weights / 4, "an engine's end needs no memory that its training did not");
}

const engine_tests::Cases kCases{{"ends", ends}};

}  // namespace

int main(int argc, char** argv) { return engine_tests::run_case(argc, argv, kCases); }
