#include "job/started_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/cores.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "job/all_gather.hpp"
#include "job/budget_check.hpp"
#include "job/device_state.hpp"
#include "job/inexact_collectives.hpp"
#include "job/job_checks.hpp"
#include "run/progress_display.hpp"
#include "run/run_folder.hpp"

namespace zr::host::job {

namespace {
// job.threads; else the number from `zeroth launch`; else this process's cores divided by the ranks of its node.
int threads_of(const config::JobConfig& config, const control::Control& control) {
  if (const int set = config.job().threads; set > 0) return set;
  if (const char* launched = std::getenv("ZR_THREADS"); launched && std::atoi(launched) > 0) return std::atoi(launched);
  const UsableCores cores = usable_cores();
  const int threads = std::max(1, cores.whole() / control.local_world());
  if (cores.limited() && control.rank() == 0)
    log(ZR_LOG_INFO,
        fmt::format("{}: {} threads per rank; set job.threads for another number", quota_text(cores), threads));
  return threads;
}

RankLocations locations_of(const control::Control& control) {
  return {control.world(), control.local_world(), ranks_of_hosts(control), std::ranges::is_sorted(control.hosts())};
}

plan::MemoryPlan plan_of(const StartedJob& job, const model::ParameterMemory& model) {
  const control::Control& control = *job.setup.control;
  const plan::PlanInput input = job_plan_input(job.setup, job.plugins, model.parameters(), locations_of(control));
  if (control.rank() == 0)
    for (const std::string& warning : group_warnings(job.config().groups(), input.parameters))
      log(ZR_LOG_WARN, warning);
  return job_plan(job.setup, job.plugins, input, true, [&](const plan::PlanInput& given) {
    return make_plan(given, control.rank(), strategy_plan(job.plugins.strategy));
  });
}

// Once, unless it changes. Training thread.
void log_state_location(const StartedJob& job, const std::string& obstacle, const StateTiers& tiers) {
  const std::string text = state_location_text(job.config(), job.plugins.optimizers, obstacle, tiers);
  static auto* logged = new std::string;  // never destroyed
  if (text != *logged) log(ZR_LOG_INFO, text);
  *logged = text;
}

// The device that the training state is on; null: it is in host memory. All ranks decide alike. Collective.
DeviceMemory* device_of(StartedJob& job, model::Model& model) {
  compare_ranks(job, model);
  DeviceMemory* const memory = model.memory();
  if (!memory) return nullptr;
  struct Obstacle {
    char text[512] = {};
    StateTiers tiers;
  } own;
  own.tiers = state_tiers_of(job.plan);
  device_obstacle(job.plan, stream_types_of(job.plugins.strategy), job.plugins.optimizers,
                  job.plugins.communicator.get(), memory->device().type)
      .copy(own.text, sizeof own.text - 1);
  std::string obstacle;
  StateTiers tiers;
  for (const Obstacle& other : all_gather(job.comm, own, "location of the training state")) {
    if (obstacle.empty()) obstacle = other.text;
    tiers.on_device |= other.tiers.on_device;
    tiers.on_tiers |= other.tiers.on_tiers;
  }
  if (job.rank() == 0) log_state_location(job, obstacle, tiers);
  job.plan.on_device = obstacle.empty();
  if (!obstacle.empty()) {
    job.plan.device_staging = {};
    return nullptr;
  }
  job.ledger.plan(Tier::host, MemoryKind::staging, job.plan.device_staging.bytes());
  model.keep_on_device();
  job.comm.open_on(*memory);
  return memory;
}

// Runs the checks that precede the opening of the communicator, and returns its options.
comm::CommRuntime::Options checked(StartedJob& job, const model::ParameterMemory& model) {
  check_plan(job.setup, job.plugins, job.plan);
  check_budget(job.setup, job.plan, model.parameters(), job.plugins.communicator.get());
  job.plan.add_to(job.ledger);
  const InexactCollectives inexact = inexact_collectives(job.config(), job.plan, job.plugins.communicator.get(),
                                                         locations_of(*job.setup.control).one_host(), job.rank() == 0);
  if (job.rank() == 0 && run::progress_wanted()) {
    const plan::PlanContext context = plan_context_of(job.setup, job.plugins.communicator.get(), job.world());
    std::fputs(job.plan.text(plan_title(job.setup, job.plugins.optimizers), context).c_str(), stdout);
    std::fflush(stdout);
  }
  comm::CommRuntime::Options options;
  options.timeout = job.config().communicator().timeout;
  options.gradients = inexact.gradients;
  options.weights = inexact.weights;
  options.planned_bytes = communicator_bytes(job.plugins.communicator.get(), job.world()).value_or(0);
  return options;
}

// A second instance of the strategy, which has described its part of the plan.
std::unique_ptr<const plugin::Instance> make_strategy_of_fp32(StartedJob& job) {
  const plugin::ResolvedJob& setup = job.setup;
  auto strategy =
      std::make_unique<const plugin::Instance>(job.host, setup.strategy, job.config(), table_of(setup.strategy));
  describe_part(*strategy, job.plan, 1);
  return strategy;
}

std::vector<const plugin::Instance*> instances_of(const StartedJob& job) {
  std::vector<const plugin::Instance*> instances{&job.plugins.strategy};
  if (job.strategy_of_fp32) instances.push_back(job.strategy_of_fp32.get());
  return instances;
}

// If the engine failed inside a plug-in's call, throws the engine's failure, otherwise the plug-in's error. Throws too
// if plug-ins have more memory than a budget permits.
CallCheck check_of(comm::CommRuntime& comm, plugin::PluginHost& host) {
  return [&comm, &host](zr_code code, const zr_error& error, const std::string& call) {
    if (const auto excess = host.take_excess()) std::rethrow_exception(excess);
    if (code == ZR_OK) return;
    if (const auto failure = comm.take_failure()) std::rethrow_exception(failure);
    if (const auto failure = host.take_failure()) std::rethrow_exception(failure);
    check(code, error, call);
  };
}
}  // namespace

StartedJob::StartedJob(Setup of, model::Model& model, std::shared_ptr<Trace> spans)
    : setup(std::move(of)),
      name(setup.engine, run::run_folder(config(), setup.engine), config().checkpoint().dir),
      pool(threads_of(config(), *setup.control)),
      host(ledger, pool),
      trace(spans                  ? std::move(spans)
            : config().job().trace ? std::make_shared<Trace>(rank())
                                   : nullptr),
      services(host, *setup.control, run::run_folder(config(), setup.engine), config().communicator().timeout),
      plugins(host, setup),
      plan(plan_of(*this, model)),
      strategy_of_fp32(plan.input.parts() > 1 ? make_strategy_of_fp32(*this) : nullptr),
      strategy_parts(instances_of(*this), plan),
      comm(host, setup.control, plugins.communicator.get(), checked(*this, model)),
      device(device_of(*this, model)),
      context{{comm, pool, plan, ledger, device},
              setup,
              model,
              strategy_parts,
              plugins.optimizers,
              check_of(comm, host),
              use} {
  host.set_context(device);
  comm.set_trace(trace.get());
}

}  // namespace zr::host::job
