// Trains a model that is only memory on two ranks, with the plug-ins of one folder, and prints a hash of all weights
// and optimizer states. Built with the headers of this version and with those of a later one (CMakeLists.txt):
//
//   evolution_job FOLDER STRATEGY [KEY=VALUE...] [fails]
//
// "fails": rank 1 fails in the second step.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <numeric>

#include "engine/session.hpp"
#include "support/shared_control.hpp"
#include "unit/core/one_rank.hpp"

namespace {

using namespace zr;
using namespace zr::host;

constexpr int kRanks = 2, kSteps = 3, kMicroSteps = 2;

struct Arguments {
  std::string folder, strategy;
  std::vector<std::string> overrides;
  bool fails = false;
};

// The ranks of this process group as a job with the plug-ins in a folder.
job::Setup setup_of(const Arguments& arguments, const std::string& runs,
                    const std::shared_ptr<control::Control>& control) {
  const auto resolved = [=](const std::vector<std::string>& more, int world) {
    std::vector<std::string> all{"strategy=" + arguments.strategy,
                                 "optimizer=sgd",
                                 "optimizer.sgd.momentum=0.9",
                                 "communicator.use=shm",
                                 "communicator.share_weights=false",
                                 "offload.optimizer=cpu",
                                 "train.micro_batch=1",
                                 "train.gradient_accumulation=" + std::to_string(kMicroSteps),
                                 "train.gradient_clipping=1.0",
                                 "train.steps=" + std::to_string(kSteps),
                                 "job.threads=1",
                                 "job.name=evolution",
                                 "job.runs=" + runs};
    for (const std::string& key : arguments.overrides)
      if (key.ends_with("=nvme")) all.push_back("offload.nvme.path=" + runs);
    all.insert(all.end(), arguments.overrides.begin(), arguments.overrides.end());
    all.insert(all.end(), more.begin(), more.end());
    const std::string toml = "[[optimizer.groups]]\nmatch = [\"b\"]\nlr_scale = 0.5\n";
    const plugin::Registry registry({arguments.folder});
    return plugin::resolve_job(config::Document::parse(toml, "job.toml", all), registry, {}, world);
  };
  job::Setup setup;
  static_cast<plugin::ResolvedJob&>(setup) = resolved({}, kRanks);
  setup.control = control;
  setup.revalidate = resolved;
  return setup;
}

// Uses a weight as an operator does, and returns the sum of its values. Weights that are not sharded stay bound.
double use(testing::FakeModel& model, uint32_t param, uint32_t phase) {
  const bool sharded = !model.memory[param], written = false;
  if (sharded) model.uses.begin(&param, 1, phase);
  const auto* values = static_cast<const float*>(sharded ? model.attached[param] : model.memory[param]);
  const double sum = std::accumulate(values, values + model.parameters()[param].count, 0.0);
  if (sharded) model.uses.end(&param, &written, 1);
  return sum;
}

int run_rank(const testing::SharedJob& job, int rank, const Arguments& arguments, const std::string& runs) {
  const auto control = std::make_shared<testing::SharedControl>(job, rank, kRanks);
  testing::FakeModel model{{{"a", 150000}, {"b", 1500}, {"c", 40}}};
  engine::Session session(setup_of(arguments, runs, control), model);
  for (int step = 0; step < kSteps; ++step) {
    if (arguments.fails && rank == 1 && step == 1) throw std::runtime_error("it fails on purpose");
    for (int micro = 0; micro < kMicroSteps; ++micro) {
      double sum = 0;
      for (uint32_t param = 0; param < 3; ++param) sum += use(model, param, ZR_FORWARD);
      session.begin_backward(sum, 1);
      for (uint32_t param = 3; param-- > 0;) {
        use(model, param, ZR_BACKWARD);
        model.give_gradient(param, 0.25F * static_cast<float>(rank + 1 + micro) + static_cast<float>(param + step));
      }
      session.end_backward();
      session.step();
    }
  }
  session.finish();
  const std::string hash = session.tensors().weights_hash();
  if (rank == 0) std::cout << arguments.strategy << " " << hash << " " << session.progress().grad_norm() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 64;
  Arguments arguments{argv[1], argv[2], {argv + 3, argv + argc}};
  arguments.fails = std::erase(arguments.overrides, "fails") > 0;
  const zr::test::Scratch scratch;
  const zr::testing::SharedJob job;
  pid_t ranks[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks[rank] = ::fork();
    if (ranks[rank] != 0) continue;
    int code = 1;
    try {
      code = run_rank(job, rank, arguments, scratch.folder().string());
    } catch (const std::exception& failure) {
      job.break_job(failure.what());
      std::fprintf(stderr, "rank %d: %s\n", rank, failure.what());
    }
    std::fflush(nullptr);
    std::_Exit(code);
  }
  int worst = 0;
  for (const pid_t rank : ranks) {
    int status = 0;
    ::waitpid(rank, &status, 0);
    worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return worst;
}
