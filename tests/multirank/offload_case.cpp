// One rank of offload_test: runs the case named on the command line; prints the failed check and exits 1, or exits 0.
//   offload_case CASE TOML [path=value ...]
#include <cstdlib>
#include <fstream>

#include "multirank/engine_run.hpp"

namespace {

using engine_tests::require;
using engine_tests::Run;

// Bytes of this process by field of /proc/self/status: "VmRSS", "VmHWM".
int64_t held(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(field + ":", 0) == 0) return std::atoll(line.c_str() + field.size() + 1) * 1024;
  return -1;
}

// When the engine ends, the model allocates memory for its weights: no more than the engine has freed.
void ends(Run& run) {
  run.build();
  run.train();
  int64_t weights = 0;
  for (const auto& parameter : run.model->parameters()) weights += static_cast<int64_t>(parameter.nbytes());
  std::ofstream("/proc/self/clear_refs") << 5;  // resets the peak
  const int64_t before = held("VmRSS");
  require(held("VmHWM") < before + weights / 8, "the kernel resets the peak of this process");
  run.engine.reset();
  const int64_t more = held("VmHWM") - before;
  std::cout << "destroying the engine took " << more << " more bytes; the weights take " << weights << std::endl;
  require(more < weights / 4, "destroying the engine needs no more memory than training");
}

const engine_tests::Cases kCases{{"ends", ends}};

}  // namespace

int main(int argc, char** argv) { return engine_tests::run_case(argc, argv, kCases); }
