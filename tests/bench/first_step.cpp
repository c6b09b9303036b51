// Seconds from starting the launcher to the end of the first step of a 10 M GPT on two ranks, beside the mark of 1.5 s.
#include <chrono>
#include <cstdio>
#include <string>

#include "bench/row.hpp"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string command = std::string("ZR_PROGRESS=plain " ZR_BUILD_DIR "/bin/zeroth launch -n 2 -- " ZR_BUILD_DIR
                                          "/bin/gpt " ZR_SOURCE_DIR "/examples/gpt/gpt.toml") +
                              " model.layers=6 model.width=384 model.context=256 train.micro_batch=4 train.steps=1 "
                              "eval.every=0 sample.length=0 "
                              "job.name=bench_first_step";
  std::vector<double> seconds, mark;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    FILE* pipe = ::popen(command.c_str(), "r");
    char line[512];
    double first = 0;
    while (std::fgets(line, sizeof line, pipe))
      if (first == 0 && std::string_view(line).substr(0, 7) == "step 1/")
        first = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (::pclose(pipe) != 0 || first == 0) {
      std::fprintf(stderr, "bench_first_step: the run failed: %s\n", command.c_str());
      return 1;
    }
    seconds.push_back(first);
    mark.push_back(1.5);
  }
  const auto row = zr::bench::compare("first_step", "s", seconds, "mark (DDP needs 2.5 s)", mark, 1.0);
  zr::bench::print(row);
  zr::bench::append(argv[1], {row});
}
