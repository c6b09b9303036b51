// The bytes that hosts send in training steps, counted by their interfaces, against those that `zeroth plan` names.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "simulators/network_hosts.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using zr::testing::Hosts;
using zr::testing::shell;

// A GPT whose ranks, so many on each host, communicate as the keys say.
struct GptJob {
  int hosts, ranks_per_host;
  std::string keys;
  std::string arguments() const {
    return " " ZR_SOURCE_DIR
           "/examples/gpt/gpt.toml model.layers=2 model.width=192 model.context=16 train.micro_batch=1 sample.length=0 "
           "eval.every=0 job.threads=1 communicator=auto communicator.mpi.hierarchy_min_bytes=0 job.name=run "
           "job.ranks=" +
           std::to_string(hosts * ranks_per_host) + " " + keys;
  }
};

// The bytes that each host sends per step, from runs of 10 and 60 steps, which differ in steps after the warm-up.
// Headers of TCP and the engine's own messages add a little to those of collectives.
std::vector<double> sent_per_step(const Hosts& hosts, const GptJob& job) {
  const zr::test::Scratch scratch;
  const auto sent_in = [&](int steps) {
    std::vector<int64_t> sent;
    for (int host = 0; host < job.hosts; ++host) sent.push_back(-hosts.sent(host));
    const auto done = shell("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " +
                            hosts.launch(job.ranks_per_host) + " " ZR_BUILD_DIR "/bin/gpt" + job.arguments() +
                            " job.runs=" + scratch.path("runs") + " train.steps=" + std::to_string(steps));
    EXPECT_EQ(done.code, 0) << done.output;
    for (int host = 0; host < job.hosts; ++host) sent[static_cast<std::size_t>(host)] += hosts.sent(host);
    return sent;
  };
  const std::vector<int64_t> many = sent_in(60), few = sent_in(10);
  std::vector<double> sent;
  for (std::size_t host = 0; host < many.size(); ++host)
    sent.push_back(static_cast<double>(many[host] - few[host]) / 50);
  return sent;
}

// "67.62 KiB"
double bytes_in(std::istringstream& text) {
  double number = 0;
  std::string unit;
  text >> number >> unit;
  return number * (unit == "MiB" ? 1 << 20 : unit == "KiB" ? 1 << 10 : 0);
}

// The bytes of all hosts, and the larger number of two hosts, beside those that `zeroth plan --hosts` names.
void expect_what_the_plan_says(const GptJob& job) {
  const Hosts hosts(job.hosts);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  const std::vector<double> sent = sent_per_step(hosts, job);
  const double total = std::accumulate(sent.begin(), sent.end(), 0.0),
               larger = *std::max_element(sent.begin(), sent.end());
  const bool is_local = job.keys.find("onebit") != std::string::npos;
  const auto plan = shell(ZR_BUILD_DIR "/bin/zeroth plan --hosts " + std::to_string(job.hosts) + "x" +
                          std::to_string(job.ranks_per_host) + job.arguments() + " | grep '" +
                          (is_local ? "step with local gradients .this job" : "this job") + "'");
  std::istringstream columns(plan.output.substr(plan.output.find("(this job)") + 10));
  const double between = bytes_in(columns), largest = bytes_in(columns);
  EXPECT_GE(total, between * 0.999) << plan.output;
  EXPECT_LE(total, between * 1.02) << plan.output;
  if (job.hosts > 2) return;
  EXPECT_GE(larger, largest * 0.999) << plan.output;
  EXPECT_LE(larger, largest * 1.02) << plan.output;
}

struct Choice {
  const char* name;
  int hosts;
  const char* keys;
};

class CommMpiHostsTrafficTest : public testing::TestWithParam<Choice> {};

TEST_P(CommMpiHostsTrafficTest, IsWhatThePlanSays) {
  expect_what_the_plan_says({GetParam().hosts, 2, GetParam().keys});
}

INSTANTIATE_TEST_SUITE_P(
    SLOW_Choices, CommMpiHostsTrafficTest,
    testing::Values(Choice{"Exact", 2, "strategy=zero0"}, Choice{"ExactOnThreeHosts", 3, "strategy=zero2"},
                    Choice{"WithinHosts", 2, "strategy=zero3 strategy.zero3.shard_within=host"},
                    Choice{"Int8", 2, "strategy=zero0 communicator.gradients=int8"},
                    Choice{"Int4", 2, "strategy=zero1 communicator.gradients=int4"},
                    Choice{"AnyOrder", 2, "strategy=zero2 communicator.exact=false"},
                    Choice{"AnyOrderOnThreeHosts", 3, "strategy=zero2 communicator.exact=false"},
                    Choice{"Int4AndInt8", 2,
                           "strategy=zero3 strategy.zero3.persistence_threshold=0 communicator.gradients=int4 "
                           "communicator.weights=int8"},
                    Choice{"OneBitAdam", 2,
                           "strategy=zero1 optimizer=onebit_adam optimizer.onebit_adam.freeze_step=4 "
                           "train.gradient_clipping=0"},
                    Choice{"Int4OnThreeHosts", 3, "strategy=zero1 communicator.gradients=int4"}),
    [](const auto& info) { return info.param.name; });

// Of the bytes of zero0, in the whole step, with one rank on each host.
struct Share {
  const char *name, *keys;
  double least;  // how many times fewer bytes
};

class CommMpiOneBitTrafficTest : public testing::TestWithParam<Share> {};

TEST_P(CommMpiOneBitTrafficTest, IsAFractionOfThatOfExactSteps) {
  const Hosts hosts(2);
  if (!hosts.unavailable().empty()) GTEST_SKIP() << "cannot create network namespaces: " << hosts.unavailable();
  const auto all = [&](const std::string& more) {
    const std::vector<double> sent = sent_per_step(hosts, {2, 1, GetParam().keys + (" " + more)});
    return sent[0] + sent[1];
  };
  const std::string onebit = "optimizer=onebit_adam optimizer.onebit_adam.freeze_step=4 train.gradient_clipping=0 ";
  const double exact = all("strategy=zero0");
  for (const std::string strategy : {"zero0", "zero2"})
    EXPECT_GE(exact / all(onebit + "strategy=" + strategy), GetParam().least) << strategy;
}

INSTANTIATE_TEST_SUITE_P(SLOW_Choices, CommMpiOneBitTrafficTest,
                         testing::Values(Share{"Fp32", "train.dtype=fp32", 28}, Share{"Bf16", "train.dtype=bf16", 21}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
