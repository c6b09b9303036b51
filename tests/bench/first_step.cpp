// Seconds from starting the launcher to the end of the first step of a 10 M GPT on two ranks, compared with two plain
// libtorch processes that train the same model, and with the target of 1.5 s.
#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>

#include "bench/row.hpp"

namespace {

// Runs a shell command; returns the seconds until `lines` lines of its output begin with `start`, or 0.
double seconds_until(const std::string& command, std::string_view start, int lines) {
  const auto began = std::chrono::steady_clock::now();
  FILE* pipe = ::popen(command.c_str(), "r");
  char line[512];
  double seconds = 0;
  while (std::fgets(line, sizeof line, pipe))
    if (std::string_view(line).substr(0, start.size()) == start && --lines == 0)
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  if (::pclose(pipe) != 0 || seconds == 0) {
    std::fprintf(stderr, "bench_first_step: the run failed: %s\n", command.c_str());
    std::exit(1);
  }
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string zeroth =
      "ZR_PROGRESS=plain " ZR_BUILD_DIR "/bin/zeroth launch -n 2 -- " ZR_BUILD_DIR "/bin/gpt " ZR_SOURCE_DIR
      "/examples/gpt/gpt.toml model.layers=6 model.width=384 model.context=256 train.micro_batch=4 train.steps=1 "
      "eval.every=0 sample.length=0 job.runs=build/runs job.name=bench_first_step";
  const std::string plain = ZR_BUILD_DIR
      "/bin/gpt_plain --layers 6 --width 384 --heads 6 --context 256 --micro-batch 4 --micro-batches 1 --steps 1 "
      "--threads 1 --eval-every 0 --sample 1";
  std::vector<double> ours, theirs, mark;
  for (int round = -1; round < 5; ++round) {  // the first round fills the page cache
    const double with = seconds_until(zeroth, "step 1/", 1);
    const double without = seconds_until(plain + " & " + plain + " & wait", "step 1 ", 2);
    if (round < 0) continue;
    ours.push_back(with);
    theirs.push_back(without);
    mark.push_back(1.5);
  }
  const std::vector<zr::bench::Row> table{
      zr::bench::compare("first_step", "s", ours, "the target (DDP: 2.5 s)", mark, 1.0),
      zr::bench::compare("first_step", "s", ours, "2 plain processes", theirs, 0)};
  for (const auto& row : table) zr::bench::print(row);
  zr::bench::append(argv[1], table);
}
