// A job's plan without a job: the strategy's input, tiers, and what [offload] and the budgets reject.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "base/draft_abi.hpp"
#include "base/text.hpp"
#include "comm/comm_runtime.hpp"
#include "job/offline_plan.hpp"
#include "run/run_log.hpp"
#include "support/said_by.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;
using ::testing::HasSubstr;
using Texts = std::vector<std::string>;

class PlanningTest : public ::testing::Test {
 protected:
  plugin::ResolvedJob job(const std::vector<std::string>& overrides = {}, const std::string& toml = "",
                          int world = 1) const {
    std::vector<std::string> all{"optimizer=adamw", "train.micro_batch=1", "job.name=unit",
                                 "job.runs=" + scratch_.path("runs")};
    if (std::none_of(overrides.begin(), overrides.end(), [](auto& one) { return one.starts_with("strategy="); }))
      all.push_back("strategy=zero1");
    all.insert(all.end(), overrides.begin(), overrides.end());
    const plugin::Registry registry({ZR_BUILD_DIR "/plugins"});
    return plugin::resolve_job(config::Document::parse(toml, "job.toml", all), registry, {}, world);
  }
  static std::vector<plan::Parameter> parameters(const std::vector<std::pair<std::string, int64_t>>& list) {
    std::vector<plan::Parameter> all;
    for (const auto& [name, count] : list) all.push_back({name, {}, {count}, count, false, 0});
    return all;
  }
  // The plan of rank 0 of a job on "a" (1500 elements) and "b" (40).
  static plan::MemoryPlan plan_of(const plugin::ResolvedJob& job, int world = 1) {
    return job::OfflinePlan(job, parameters({{"a", 1500}, {"b", 40}}), world).plan(0);
  }
  // What plan_input() makes of these parameters.
  plan::PlanInput input_of(const plugin::ResolvedJob& job, std::vector<plan::Parameter> list, int world = 1) const {
    Ledger ledger;
    ThreadPool pool(1);
    plugin::PluginHost host(ledger, pool);
    const job::Optimizers optimizers(host, job);
    plan::PlanInput input = job::plan_input(job.config, optimizers, std::move(list), world);
    EXPECT_TRUE(input.elementwise());
    EXPECT_EQ(input.descriptions[0].needs, 0u);
    return input;
  }
  std::string on_disk() const { return "offload.nvme.path=\"" + scratch_.path("disk") + "\""; }
  const test::Scratch scratch_;
};

TEST_F(PlanningTest, TableOfAComponentHasItsRoleAndId) {
  const plugin::ResolvedJob nvme = job({"offload.optimizer=nvme", on_disk()});
  EXPECT_EQ(job::table_of(nvme.strategy), "strategy.zero1");
  EXPECT_EQ(job::table_of(nvme.optimizer), "optimizer.adamw");
  ASSERT_EQ(nvme.tiers.size(), 1u);
  EXPECT_EQ(job::table_of(nvme.tiers[0]), "offload.nvme");
}

TEST_F(PlanningTest, InputHasTheValuesOfTheConfiguration) {
  const plan::PlanInput plain = input_of(job(), parameters({{"a", 1500}}));
  EXPECT_EQ(plain.weight_dtype, ZR_F32);
  EXPECT_EQ(plain.communicated_grad_dtype, ZR_F32);
  EXPECT_EQ(plain.reduced_grad_dtype, ZR_F32);
  EXPECT_EQ(plain.accumulation, 1);
  EXPECT_FALSE(plain.accumulates_locally);
  const plan::PlanInput input =
      input_of(job({"train.dtype=bf16", "train.gradient_accumulation=4", "gradients.reduce=last_micro_step"}, "", 3),
               parameters({{"a", 1500}, {"b", 40}}), 3);
  EXPECT_EQ(input.world, 3);
  EXPECT_EQ(input.weight_dtype, ZR_BF16);
  EXPECT_EQ(input.reduced_grad_dtype, ZR_F32);
  EXPECT_EQ(input.accumulation, 4);
  EXPECT_TRUE(input.accumulates_locally);
  ASSERT_EQ(input.descriptions.size(), 1u);
  EXPECT_EQ(input.state_names(), (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  ASSERT_EQ(input.parameters.size(), 2u);
  EXPECT_EQ(input.parameters[1].name, "b");
  EXPECT_EQ(input.parameters[1].count, 40);
}

constexpr const char* kGroups =
    "[[optimizer.groups]]\nmatch = [\"*.bias\", \"norm.*\"]\nweight_decay = 0.0\n"
    "[[optimizer.groups]]\nmatch = \"decoder.*\"\nlr_scale = 0.5\n";

TEST_F(PlanningTest, FirstMatchingGroupGetsAParameter) {
  const plan::PlanInput input = input_of(job({}, kGroups), parameters({{"encoder.weight", 8},
                                                                       {"encoder.bias", 8},
                                                                       {"decoder.weight", 8},
                                                                       {"decoder.bias", 8},
                                                                       {"norm.weight", 8}}));
  std::vector<uint32_t> groups;
  for (const plan::Parameter& parameter : input.parameters) groups.push_back(parameter.group);
  EXPECT_EQ(groups, (std::vector<uint32_t>{0, 1, 2, 1, 1}));
}

TEST_F(PlanningTest, RejectsAGroupPatternThatMatchesNothing) {
  EXPECT_EQ(failure_of([&] {
              input_of(job({}, kGroups), parameters({{"x.bias", 8}, {"decoder.w", 8}}));
            }),
            "job.toml:1:1: optimizer group pattern 'norm.*' matches no parameter; `*` matches any sequence of "
            "characters");
  EXPECT_EQ(failure_of([&] {
              input_of(job({}, "[[optimizer.groups]]\nmatch = \"hed\"\n"), parameters({{"head", 8}, {"tail", 8}}));
            }),
            "job.toml:1:1: optimizer group pattern 'hed' matches no parameter; the nearest is 'head'; `*` matches any "
            "sequence of characters");
}

TEST_F(PlanningTest, RejectsAGroupPatternThatMatchesOnlyTheSecondNameOfATiedParameter) {
  std::vector<plan::Parameter> tied = parameters({{"embedding.weight", 8}, {"tail", 8}});
  tied[0].aliases = {"head.weight"};
  EXPECT_EQ(failure_of([&] { input_of(job({}, "[[optimizer.groups]]\nmatch = \"head.*\"\n"), tied); }),
            "job.toml:1:1: optimizer group pattern 'head.*' matches only a second name of a tied parameter, "
            "'head.weight'; write its first name, 'embedding.weight'");
}

TEST_F(PlanningTest, WarnsOfAGroupThatEarlierGroupsHide) {
  const plugin::ResolvedJob hidden = job(
      {},
      "[[optimizer.groups]]\nmatch = \"*\"\n\n[[optimizer.groups]]\nmatch = [\"head\", \"tail\"]\nlr_scale = 2.0\n");
  const plan::PlanInput input = input_of(hidden, parameters({{"body", 8}, {"head", 8}, {"tail", 8}}));
  EXPECT_EQ(job::group_warnings(hidden.config.groups(), input.parameters),
            Texts{"job.toml:4:1: the group with match = [\"head\", \"tail\"] in [[optimizer.groups]] has no effect: "
                  "earlier groups match all of its parameters, for example the group with match = [\"*\"] "
                  "(job.toml:1:1) matches 'head'; the first matching group wins, so write special groups first"});
  const plugin::ResolvedJob both = job({}, kGroups);
  const plan::PlanInput used =
      input_of(both, parameters({{"decoder.bias", 8}, {"decoder.weight", 8}, {"norm.weight", 8}}));
  EXPECT_EQ(job::group_warnings(both.config.groups(), used.parameters), Texts{});
}

TEST_F(PlanningTest, SharesWeightsOnlyBetweenRanksWithWeightsOnTheDevice) {
  const auto shares = [&](const std::vector<std::string>& overrides, int world) {
    const plugin::ResolvedJob resolved = job(overrides, "", world);
    return job::OfflinePlan(resolved, parameters({{"a", 1500}}), world, {world}).plan(0).input.share_weights;
  };
  EXPECT_TRUE(shares({}, 2));
  EXPECT_FALSE(shares({}, 1));
  EXPECT_FALSE(shares({"communicator.share_weights=false"}, 2));
  EXPECT_FALSE(shares({"memory.device_budget=1GiB"}, 2));
  EXPECT_FALSE(shares({"strategy=zero3", "strategy.zero3.persistence_threshold=0", "offload.parameters=cpu"}, 2));
}

TEST_F(PlanningTest, SnapshotsOnlyForAsynchronousSavesToAFolder) {
  EXPECT_TRUE(job::snapshots(job({"checkpoint.async=true", "checkpoint.dir=ck"}).config));
  EXPECT_FALSE(job::snapshots(job({"checkpoint.async=false", "checkpoint.dir=ck"}).config));
  EXPECT_FALSE(job::snapshots(job({"checkpoint.async=true"}).config));
}

TEST_F(PlanningTest, CommunicatorBytesOfOneRankAreTheStagingBuffer) {
  EXPECT_EQ(job::communicator_bytes(nullptr, 1), comm::CommRuntime::staging_bytes(1));
}

TEST_F(PlanningTest, CommunicatorBytesAreUnknownWithoutItsReport) {
  const plugin::ResolvedJob two = job({}, "", 2);
  zr_component silent = *two.communicator->table;
  silent.extension = nullptr;
  plugin::Component component = *two.communicator;
  component.table = &silent;
  Ledger ledger;
  ThreadPool pool(1);
  plugin::PluginHost host(ledger, pool);
  const plugin::Instance communicator(host, component, two.config, job::table_of(component));
  EXPECT_EQ(job::communicator_bytes(&communicator, 2), std::nullopt);
}

TEST_F(PlanningTest, TiersOfARequestHaveTheIdsOfTheConfiguration) {
  const plugin::ResolvedJob offloads =
      job({"offload.optimizer=nvme", "offload.activations=cpu", "offload.device_fraction=0.25",
           "memory.device_budget=1GiB", "checkpoint.async=true", "checkpoint.dir=ck", on_disk()});
  const plan::PlanInput input = plan_of(offloads).input;
  ASSERT_EQ(input.tiers.size(), 3u);
  EXPECT_EQ(input.tiers[0].id, "device");
  const plan::TierRequest& request = input.tier_request;
  EXPECT_EQ(input.tiers[static_cast<std::size_t>(request.states)].id, "nvme");
  EXPECT_EQ(input.tiers[static_cast<std::size_t>(request.states)].tier, Tier::disk);
  EXPECT_EQ(input.tiers[static_cast<std::size_t>(request.activations)].id, "cpu");
  EXPECT_EQ(input.tiers[static_cast<std::size_t>(request.activations)].tier, Tier::host);
  EXPECT_EQ(request.reduced_gradients, 0);
  EXPECT_EQ(request.shards, 0);
  EXPECT_EQ(request.device_fraction, 0.25);
  EXPECT_EQ(request.device_capacity, int64_t{1} << 30);
  EXPECT_EQ(request.host_capacity, 0);
  EXPECT_TRUE(request.snapshot);
  EXPECT_FALSE(request.activations_known);
  EXPECT_EQ(plan_of(job({"offload.optimizer=auto"})).input.tier_request.states, plan::kAnyTier);
}

TEST_F(PlanningTest, HostCapacityIsTheRanksPartOfTheBudgetThatIsNotInUse) {
  const plugin::ResolvedJob limited = job({"memory.host_budget=1MiB"});
  plan::PlanInput input;
  job::add_tiers(input, limited, {}, 4, 100);
  EXPECT_EQ(input.tier_request.host_capacity, (1 << 20) / 4 - 100);
  job::add_tiers(input, limited, {}, 4, 1 << 20);
  EXPECT_EQ(input.tier_request.host_capacity, 1) << "nothing is left; 0 would mean no limit";
}

TEST_F(PlanningTest, KnowsTheActivationsOfAnEarlierRun) {
  const plugin::ResolvedJob resolved = job();
  {
    run::RunLog log(resolved.config, "", 1, 0);
    log.accept();
    Ledger ledger;
    ledger.observe(Tier::device, MemoryKind::activations, "activations", 0, 70);
    ledger.observe(Tier::disk, MemoryKind::activations, "activations", 0, 5);
    log.finish(ledger, {});
  }
  const plan::TierRequest request = plan_of(resolved).input.tier_request;
  EXPECT_TRUE(request.activations_known);
  EXPECT_EQ(request.activations_on_device, 70);
  EXPECT_EQ(request.activations_offloaded, 5);
  const plan::PlanContext context = job::plan_context_of(resolved, nullptr, 1);
  EXPECT_EQ(context.activations, 70);
  EXPECT_EQ(context.offloaded_activations, 5);
  EXPECT_EQ(context.measured_by, scratch_.path("runs/unit"));
  EXPECT_EQ(context.communicator, comm::CommRuntime::staging_bytes(1));
  EXPECT_FALSE(context.snapshot);
}

TEST_F(PlanningTest, RejectsOffloadedParametersThatTheStrategyKeeps) {
  EXPECT_EQ(failure_of([&] { plan_of(job({"offload.parameters=cpu"})); }),
            "offload.parameters = \"cpu\" (command line): strategy 'zero1' keeps full parameters on the device, so "
            "they cannot be offloaded; choose a strategy that shards parameters");
  EXPECT_EQ(failure_of([&] {
              plan_of(
                  job({"strategy=zero3", "offload.parameters=cpu", "strategy.zero3.persistence_threshold=2000"}, "", 2),
                  2);
            }),
            "offload.parameters = \"cpu\" (command line): strategy 'zero3' keeps all parameters of this model "
            "unsharded on the device: the largest has 1500 elements, and parameters of at most "
            "strategy.zero3.persistence_threshold = 2000 elements are not sharded; lower that key, or set "
            "offload.parameters = \"device\"");
  EXPECT_EQ(failure_of([&] {
              plan_of(
                  job({"strategy=zero3", "offload.parameters=cpu", "strategy.zero3.persistence_threshold=1499"}, "", 2),
                  2);
            }),
            "");
}

TEST_F(PlanningTest, RejectsADeviceFractionOfStatesThatNoKeyOffloads) {
  const std::string start =
      "command line: offload.device_fraction is the fraction of the optimizer states that stays on the device, but ";
  EXPECT_EQ(failure_of([&] { plan_of(job({"offload.device_fraction=0.5"})); }),
            start + "offload.optimizer = \"device\" keeps all of them there; set offload.optimizer to a tier");
  EXPECT_EQ(failure_of([&] {
              plan_of(job({"offload.device_fraction=0.5", "offload.optimizer=auto"}));
            }),
            start +
                "offload.optimizer = \"auto\" computes it from memory.device_budget; set offload.optimizer to a "
                "tier, or remove offload.device_fraction");
}

TEST_F(PlanningTest, RejectsADiskForGradientsThatAreAccumulatedInPlace) {
  EXPECT_EQ(
      failure_of([&] {
        plan_of(job({"offload.gradients=nvme", on_disk()}));
      }),
      "offload.gradients = \"nvme\" (command line): strategy 'zero1' accumulates gradients in place in the buffer "
      "'gradients, unsharded', which cannot be on a disk tier; choose a strategy with a separate buffer for "
      "reduced gradients, or a tier in memory");
  EXPECT_EQ(failure_of([&] { plan_of(job({"offload.gradients=cpu"})); }), "");
}

TEST_F(PlanningTest, RejectsADiskForWeightsThatOperatorsUseInPlace) {
  const std::vector<std::string> disk{"strategy=zero3", "offload.parameters=nvme",
                                      "strategy.zero3.persistence_threshold=0", on_disk()};
  EXPECT_EQ(
      failure_of([&] { plan_of(job(disk)); }),
      "offload.parameters = \"nvme\" (command line): strategy 'zero3' keeps 'a' unsharded, and operators access it "
      "in place, so it cannot be on a disk tier; train on more ranks, or choose a tier in memory");
  EXPECT_EQ(failure_of([&] { plan_of(job(disk, "", 2), 2); }), "");
}

TEST_F(PlanningTest, HostBytesAreThoseOfAllRanksOfANode) {
  plan::MemoryPlan plan = plan_of(job());
  plan.input.world = 4;
  plan.max_host_bytes = 1000;
  EXPECT_EQ(job::host_bytes(plan, 2, std::nullopt, false), 500);
  EXPECT_EQ(job::host_bytes(plan, 2, 30, false), 500 + 2 * 30);
  // Each rank copies a quarter of 1500 and 40 elements: weights and two states of 4 bytes.
  EXPECT_EQ(job::host_bytes(plan, 2, 30, true), 500 + 2 * 30 + 2 * (375 + 10) * 12);
}

TEST_F(PlanningTest, HostBudgetNamesTheLargestUse) {
  const auto message = [](const plan::MemoryPlan& plan, const plan::PlanContext& context, const std::string& taken,
                          const std::string& remedy) {
    return "memory.host_budget is 1.00 KiB (command line), but the plan takes " + taken +
           " of host memory for all ranks of a node together\n" + plan.text("plan", context) +
           "raise memory.host_budget, or " + remedy;
  };
  const plugin::ResolvedJob plain = job({"memory.host_budget=1KiB"});
  const plan::MemoryPlan plan = plan_of(plain);
  plan::PlanContext context;
  const auto failure = [&](const plugin::ResolvedJob& of, const plan::MemoryPlan& planned) {
    return failure_of([&] { job::check_host_budget(of.config, planned, 1, context); });
  };
  EXPECT_EQ(failure(plain, plan), "") << "nothing is in host memory";
  context.communicator = 1024;
  EXPECT_EQ(failure(plain, plan), "") << "exactly the budget";
  context.communicator = 4096;
  EXPECT_EQ(failure(plain, plan),
            message(plan, context, "4.00 KiB",
                    "start fewer ranks on this node, because the communicator of each rank takes memory"));
  context.snapshot = true;  // 12 bytes of each of 1540 elements: 18480 bytes
  EXPECT_EQ(failure(plain, plan),
            message(plan, context, "22.05 KiB", "set checkpoint.async = false, which needs no copy"));
  context = {};
  const plugin::ResolvedJob offloads = job({"memory.host_budget=1KiB", "offload.optimizer=cpu"});
  const plan::MemoryPlan offloaded = plan_of(offloads);
  EXPECT_EQ(failure(offloads, offloaded),
            message(offloaded, context, bytes_text(offloaded.bytes(Tier::host)),
                    "keep more of offload.optimizer on the device, or set it to a disk tier"));
  EXPECT_EQ(failure(job(), plan_of(job())), "") << "without a budget";
}

// 4096 parameters in 4 norm blocks, so each of 4 ranks owns 1024.
TEST_F(PlanningTest, PlannerShardsTheStatesOfZero1) {
  const job::OfflinePlan four(job({}, "", 4), parameters({{"a", 4096}}), 4), one(job(), parameters({{"a", 4096}}), 1);
  EXPECT_EQ(four.title(), "plan: zero1 + adamw");
  for (int rank = 0; rank < 4; ++rank) {
    std::map<MemoryKind, int64_t> bytes = four.plan(rank).bytes_by_kind();
    EXPECT_EQ(bytes[MemoryKind::weights], 4 * 4096);
    EXPECT_EQ(bytes[MemoryKind::optimizer], 2 * 4 * 1024) << rank;
  }
  EXPECT_EQ(one.plan(0).bytes_by_kind()[MemoryKind::optimizer], 2 * 4 * 4096);
}

TEST_F(PlanningTest, PlannerSharesWeightsOnOneNode) {
  const job::OfflinePlan shared(job({}, "", 4), parameters({{"a", 4096}}), 4, {4});
  EXPECT_EQ(shared.plan(0).bytes_by_kind()[MemoryKind::weights], 4 * 4096 / 4) << "a rank's part of one copy";
}

TEST_F(PlanningTest, PlannersLargestRankIsExactForFewRanks) {
  const std::vector<plan::Parameter> uneven = parameters({{"a", 1500}, {"b", 40}});  // 3 norm blocks
  const job::OfflinePlan two(job({}, "", 2), uneven, 2), many(job({}, "", 17), uneven, 17);
  EXPECT_NE(two.plan(0).bytes(), two.plan(1).bytes());
  EXPECT_EQ(two.max_bytes(), std::max(two.plan(0).bytes(), two.plan(1).bytes()));
  EXPECT_EQ(many.max_bytes(), many.plan(0).bytes());
}

// The folder tests/plugins/sim has the communicators "mpi", "nccl" and "shm"; only "nccl" has the tag
// zr_tag_several_hosts.
class AutomaticCommunicatorTest : public PlanningTest {
 protected:
  // The sentence about the communicator, with file names in place of paths.
  static std::string choice(bool several_hosts, const std::vector<std::string>& overrides, int world = 2) {
    std::vector<std::string> all{"strategy=zero1", "optimizer=adamw", "train.micro_batch=1", "job.name=unit"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    config::Document document = config::Document::parse("", "job.toml", all);
    if (several_hosts) document.set_several_hosts();
    const plugin::Registry registry({ZR_BUILD_DIR "/tests/plugins", ZR_BUILD_DIR "/plugins"});
    const plugin::ResolvedJob job = plugin::resolve_job(document, registry, {}, world);
    std::string text = job.communicator_choice;
    const std::string folder = job.communicator ? job.communicator->file.parent_path().string() : "";
    if (const auto at = text.find(folder); !text.empty() && at != text.npos)
      text.replace(at, folder.size(), job.communicator->file.parent_path().filename().string());
    return text;
  }
};

TEST_F(AutomaticCommunicatorTest, HasMemoryOfTheDevice) {
  EXPECT_EQ(
      choice(false, {"job.device=sim"}),
      "communicator = \"auto\" is 'shm' (sim/zr_communicator_shm.so): it can exchange memory of 'sim' between ranks "
      "on one host, with exact results");
  EXPECT_EQ(choice(true, {"job.device=sim:1", "communicator=auto"}),
            "communicator = \"auto\" is 'nccl' (sim/zr_communicator_nccl.so): it can exchange memory of 'sim' between "
            "ranks on several hosts, with exact results");
}

TEST_F(AutomaticCommunicatorTest, AcceptsKeysOfTheCommunicatorThatItDoesNotChoose) {
  EXPECT_THAT(choice(false, {"job.device=sim", "communicator.nccl.staging_bytes=1MiB"}), HasSubstr("'shm'"));
  EXPECT_THAT(choice(true, {"job.device=sim", "communicator.nccl.staging_bytes=1MiB"}), HasSubstr("'nccl'"));
}

TEST_F(AutomaticCommunicatorTest, ExchangesHostMemoryIfThereIsNoLibraryForTheDevice) {
  EXPECT_EQ(
      choice(false, {"job.device=other"}),
      "communicator = \"auto\" is 'shm' (plugins/zr_communicator_shm.so): there is no communicator with memory of "
      "'other' for ranks on one host, so the ranks exchange host memory");
}

TEST_F(AutomaticCommunicatorTest, IsMpiIfCollectivesMayBeInexact) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "built without MPI";
  EXPECT_EQ(choice(true, {"job.device=sim", "communicator.exact=false", "communicator.gradients=int8"}),
            "communicator = \"auto\" is 'mpi' (sim/zr_communicator_mpi.so): collectives between hosts may be inexact "
            "(communicator.exact = false, communicator.gradients = \"int8\"); communicator = \"nccl\" is exact");
}

TEST_F(AutomaticCommunicatorTest, SaysNothingWithoutADeviceAndForANamedCommunicator) {
  EXPECT_EQ(choice(false, {}), "");
  EXPECT_EQ(choice(false, {"job.device=sim", "communicator=shm"}), "");
  EXPECT_EQ(choice(false, {"job.device=sim"}, 1), "");
}

TEST_F(AutomaticCommunicatorTest, PlansPrintTheChoice) {
  const plugin::ResolvedJob two = job({"job.device=other"}, "", 2);
  const job::OfflinePlan offline(two, parameters({{"a", 1500}}), 2);
  EXPECT_THAT(offline.plan(0).text("plan", offline.context()), HasSubstr("\n  " + two.communicator_choice + "\n"));
}

// tests/plugins/good has an optimizer for host memory, tests/plugins/device_default/sim the same with another default.
TEST_F(PlanningTest, RejectsAnOptimizerForADeviceWithAnotherDefault) {
  const std::string folder = ZR_BUILD_DIR "/tests/plugins",
                    for_sim = folder + "/device_default/sim/zr_optimizer_bad.so";
  const plugin::Registry registry({folder + "/good", folder + "/device_default", ZR_BUILD_DIR "/plugins"});
  const auto resolve = [&](const std::string& optimizer, const std::string& device) {
    plugin::resolve_job(config::Document::parse("", "job.toml",
                                                {"strategy=zero1", "train.micro_batch=1", "job.name=unit",
                                                 "optimizer=" + optimizer, "job.device=" + device}),
                        registry, {}, 1);
  };
  EXPECT_EQ(
      test::said_by([&] { resolve("bad", "sim"); }, exit_code::environment),
      for_sim + ": the default of optimizer.bad.rate is 0.25, but 0.5 in " + folder +
          "/good/zr_optimizer_bad.so, so that a job would train differently on this device than on the CPU: install "
          "both libraries in the same version");
  EXPECT_NO_THROW(resolve("bad", "other"));
  EXPECT_NO_THROW(resolve(for_sim, "sim")) << "named by its path";
}

TEST_F(PlanningTest, TextOfAPlanOverBudgetHasThePlanAndTheSuggestions) {
  const plugin::ResolvedJob limited = job({"memory.device_budget=2KiB"});
  const job::OfflinePlan offline(limited, parameters({{"a", 1500}}), 1);
  EXPECT_EQ(job::plan_over_budget_text(limited.config, offline, 3 << 10, "set this\n"),
            "memory.device_budget is 2.00 KiB (command line), but the plan takes up to 3.00 KiB per rank, without "
            "activations\n" +
                offline.plan(0).text("plan: zero1 + adamw", offline.context()) + "set this\n");
}

}  // namespace
}  // namespace zr::testing
