// Training on two hosts, network namespaces with a link of 1 Gbit/s and one rank of one thread each: a GPT of 85
// million parameters (12 layers, width 768) with onebit_adam after its warm-up, against adamw under zero0 at one
// sequence of 64 tokens per rank, and against two jobs of one rank, which communicate nothing, at 2 x 256 tokens. In
// alternation. Needs root. Rows are milliseconds per step, the median of a run's last steps.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>

#include "bench/row.hpp"
#include "simulators/network_hosts.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using namespace zr::bench;
using namespace zr::testing;

constexpr int kRounds = 2, kWarmUp = 2, kMeasured = 3;  // steps
constexpr const char* kRate = "1gbit";
constexpr double kOfZero0InFp32 = 4, kOfZero0InBf16 = 3, kOfComputation = 1 / 1.15;

class Jobs {
 public:
  Jobs() : hosts_(2) {
    if (!hosts_.unavailable().empty())
      throw std::runtime_error("cannot create network namespaces (needs root): " + hosts_.unavailable());
    hosts_.limit_rate(kRate);
  }
  /// Milliseconds of a step on two hosts, after `before` others.
  double on_hosts(const std::string& keys, int before) const {
    run(hosts_.launch(1) + program("hosts", keys + " communicator=auto job.ranks=2", before));
    return step_ms("hosts");
  }
  /// Milliseconds of a step of two jobs at once, with one rank each.
  double alone(const std::string& keys) const {
    const auto one = [&](const std::string& name) {
      return ZR_BUILD_DIR "/bin/zeroth launch -n 1 --" + program(name, keys + " job.ranks=1", 1);
    };
    run("{ " + one("first") + " & " + one("second") + "; code=$?; wait $! && exit $code; }");
    return std::max(step_ms("first"), step_ms("second"));
  }

 private:
  std::string program(const std::string& name, const std::string& keys, int before) const {
    return " " ZR_BUILD_DIR "/bin/gpt " ZR_SOURCE_DIR
           "/examples/gpt/gpt.toml model.layers=12 model.width=768 model.heads=12 sample.length=0 eval.every=0 "
           "job.threads=1 train.gradient_clipping=0 train.steps=" +
           std::to_string(before + kMeasured) + " job.name=" + name + " job.runs=" + scratch_.path("runs") + " " + keys;
  }
  static void run(const std::string& command) {
    const auto done = shell("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + command);
    if (done.code != 0) throw std::runtime_error(command + "\n" + done.output);
  }
  double step_ms(const std::string& name) const {
    std::ifstream rows(scratch_.path("runs/" + name + "/metrics.jsonl"));
    std::vector<double> times;
    for (std::string row; std::getline(rows, row);) times.push_back(nlohmann::json::parse(row).at("step_ms"));
    times.erase(times.begin(), times.end() - kMeasured);
    return median(times);
  }

  const Hosts hosts_;
  const zr::test::Scratch scratch_;
};

// Without them, a step of the model takes a quarter of a minute.
bool has_16_bit_instructions() {
  std::ifstream about("/proc/cpuinfo");
  for (std::string word; about >> word;)
    if (word == "avx512_bf16" || word == "amx_bf16") return true;
  return false;
}

std::vector<Row> measure() {
  const Jobs jobs;
  const std::string zero0 = " strategy=zero0 ",
                    onebit = " strategy=zero0 optimizer=onebit_adam optimizer.onebit_adam.freeze_step=" +
                             std::to_string(kWarmUp),
                    one_sequence = "model.context=64 train.micro_batch=1",
                    usual_batch = "model.context=256 train.micro_batch=2";
  std::vector<Row> rows;
  const auto add = [&](const std::string& name, const std::function<double()>& ours, const std::string& reference,
                       const std::function<double()>& theirs, double target) {
    std::vector<double> own, others;
    for (int round = 0; round < kRounds; ++round) {
      own.push_back(ours());
      others.push_back(theirs());
    }
    rows.push_back(compare(name, "ms/step", own, reference, others, target));
    print(rows.back());
  };
  for (const std::string dtype : {"fp32", "bf16"}) {
    if (dtype == "bf16" && !has_16_bit_instructions()) {
      std::cout << "onebit_1gbit_bf16: skipped, because this processor has no instructions for bf16\n";
      continue;
    }
    const std::string keys = one_sequence + " train.dtype=" + dtype;
    add(
        "onebit_1gbit_" + dtype, [&] { return jobs.on_hosts(keys + onebit, kWarmUp + 1); }, "zero0, adamw",
        [&] { return jobs.on_hosts(keys + zero0, 1); }, dtype == "fp32" ? kOfZero0InFp32 : kOfZero0InBf16);
  }
  add(
      "onebit_1gbit_usual_batch", [&] { return jobs.on_hosts(usual_batch + onebit, kWarmUp + 1); }, "computation alone",
      [&] { return jobs.alone(usual_batch + zero0); }, kOfComputation);
  return rows;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<Row> rows = measure();
  if (argc > 1) append(argv[1], rows);
  return 0;
} catch (const std::exception& failure) {
  std::cerr << "bench_hosts_training: " << failure.what() << std::endl;
  return 1;
}
