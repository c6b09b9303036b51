// The collectives of a step of the shipped strategies, and what they transfer, without ranks.
#include "job/simulated_step.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>

#include "base/dtype.hpp"
#include "comm/coll.hpp"
#include "comm/comm_volume.hpp"
#include "job/offline_plan.hpp"
#include "unit/core/one_rank.hpp"

namespace zr::testing {
namespace {

using namespace host;

// Sizes without padding: multiples of the alignment, but not of the ranks or of a norm block.
std::vector<plan::Parameter> blocks_of(int layers, int64_t width) {
  std::vector<plan::Parameter> all;
  const auto add = [&](const std::string& name, int64_t count, bool frozen = false) {
    all.push_back({name, {}, {count}, count, frozen});
  };
  add("embedding.weight", 33 * width);
  for (int i = 0; i < layers; ++i) {
    const std::string layer = "layers." + std::to_string(i);
    add(layer + ".norm.weight", width);
    add(layer + ".proj.weight", width * width);
    add(layer + ".proj.bias", width);
  }
  add("old.weight", 5 * width, true);
  add("head.weight", 33 * width);
  return all;
}

class SimulatedStepTest : public ::testing::Test {
 protected:
  plugin::ResolvedJob job(int world, std::vector<std::string> overrides) const {
    overrides.insert(overrides.begin(),
                     {"optimizer=adamw", "train.micro_batch=1", "job.name=unit", "job.runs=" + scratch_.path("runs")});
    const plugin::Registry registry({ZR_BUILD_DIR "/plugins", ZR_BUILD_DIR "/tests/plugins"});
    return plugin::resolve_job(config::Document::parse("", "job.toml", overrides), registry, {}, world);
  }
  void simulate(const plugin::ResolvedJob& of, const plan::MemoryPlan& plan, const job::CollectiveSink& sink,
                job::SimulatedStep which = job::SimulatedStep::reduced_gradients) {
    job::simulate_step(host_, of, plan, which, sink);
  }
  const test::Scratch scratch_;

 private:
  Ledger ledger_;
  ThreadPool pool_{1};
  job::EngineHost host_{ledger_, pool_};
};

class SimulatedStrategyTest : public SimulatedStepTest, public ::testing::WithParamInterface<std::string> {};

// Every rank of a large job issues the same collectives, and they bring what `zeroth plan` says, to the byte. zero3's
// plan is an upper bound: the parameter that is used last in forward and first in backward stays gathered, and so does
// the first one of the model between micro-steps, if no event ends the backward of the first. They have the same size.
TEST_P(SimulatedStrategyTest, ThousandRanksReceiveWhatThePlanSays) {
  constexpr int kWorld = 1024;
  for (const auto& [dtype, reduce] : {std::pair("fp32", "each_micro_step"), {"bf16", "last_micro_step"}}) {
    std::vector<std::string> keys{"strategy=" + GetParam(),
                                  std::string("train.dtype=") + dtype,
                                  std::string("gradients.reduce=") + reduce,
                                  "train.gradient_accumulation=2",
                                  "strategy." + GetParam() + ".bucket_bytes=256KiB",
                                  "communicator=shm"};
    if (GetParam() == "zero3") {
      keys.insert(keys.end(), {"strategy.zero3.persistence_threshold=1000", "strategy.zero3.max_reuse_bytes=0"});
    }
    const plugin::ResolvedJob of = job(kWorld, keys);
    const job::OfflinePlan offline(of, blocks_of(3, 160), kWorld);
    const plan::StepCommunication planned = offline.plan(0).communication();
    std::vector<uint64_t> first;
    std::vector<int64_t> received(16, 0);
    for (int rank = 0; rank < kWorld; ++rank) {
      std::vector<uint64_t> own;
      const comm::CommVolumeCounter counter(rank, kWorld, 1);
      simulate(of, offline.plan(rank), [&](const zr_coll& coll) {
        own.push_back(comm::fingerprint_of(coll, kWorld));
        received[coll.op] += counter.received_bytes(coll);
      });
      if (rank == 0) first = own;
      ASSERT_EQ(own, first) << "rank " << rank;
    }
    EXPECT_GT(first.size(), GetParam() == "zero0" ? 1u : 2u) << "several buckets";
    const bool is_held = std::string(reduce) == "last_micro_step";
    const int64_t kept = GetParam() == "zero3" ? (is_held ? 3 * 2 : 2 * 4) * 33 * 160 * (kWorld - 1) : 0;
    EXPECT_EQ(std::accumulate(received.begin(), received.end(), int64_t{0}), planned.bytes() - kept) << dtype;
    if (GetParam() == "zero0" && is_held)  // one reduction per step
      EXPECT_EQ(received[ZR_ALL_REDUCE], planned.bytes()) << dtype;
    else
      EXPECT_EQ(received[ZR_REDUCE_SCATTER], planned.gradients.bytes()) << dtype;
  }
}

// Every rank of a job of 128 hosts with 8 ranks issues the same collectives, whose bytes are, by the table of
// docs/communicators.md: the sum of a part passes from host to host in fp32, with what it is added to first, and
// returns from the last one, in the type of the result, to its host or to all others; a gather passes to each host
// once.
TEST_P(SimulatedStrategyTest, HostsExchangeWhatTheTableOfTheCommunicatorSays) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "MPI was not found";
  constexpr int kHosts = 128, kRanks = 8, kWorld = kHosts * kRanks;
  for (const auto& [dtype, reduce] : {std::pair("fp32", "each_micro_step"), {"bf16", "last_micro_step"}}) {
    const plugin::ResolvedJob of =
        job(kWorld, {"strategy=" + GetParam(), "strategy." + GetParam() + ".bucket_bytes=512KiB",
                     std::string("train.dtype=") + dtype, std::string("gradients.reduce=") + reduce,
                     "train.gradient_accumulation=2", "communicator=mpi", "communicator.mpi.hierarchy_min_bytes=0"});
    job::OfflinePlan offline(of, blocks_of(3, 160), kWorld, job::HostSizes(kHosts, kRanks));
    int64_t expected = 0;
    std::vector<uint64_t> first;
    simulate(of, offline.plan(0), [&](const zr_coll& coll) {
      first.push_back(comm::fingerprint_of(coll, kWorld));
      const int64_t sum = 4, result = size_of(static_cast<zr_dtype>(coll.dst.dtype));
      if (coll.op == ZR_ALL_REDUCE) expected += (sum + result) * coll.src.count * (kHosts - 1);
      if (coll.op == ZR_ALL_REDUCE) return;
      for (int rank = 0; rank < kWorld; ++rank) {
        const bool is_last = rank / kRanks == kHosts - 1;
        const int64_t part = comm::part_of_rank(coll.counts, comm::total_of(coll, kWorld), rank, kWorld).count;
        ASSERT_TRUE(coll.op == ZR_REDUCE_SCATTER || coll.op == ZR_ALL_GATHER) << coll.op;
        expected += (coll.op == ZR_REDUCE_SCATTER ? sum : result) * part * (kHosts - 1);
        if (coll.op == ZR_REDUCE_SCATTER && !is_last) expected += result * part;
        if ((coll.flags & ZR_COLL_ACCUMULATE) && rank / kRanks > 0) expected += result * part;  // what it adds to
      }
    });
    for (int rank = 1; rank < kWorld; ++rank) {
      std::vector<uint64_t> own;
      simulate(of, offline.plan(rank), [&](const zr_coll& coll) { own.push_back(comm::fingerprint_of(coll, kWorld)); });
      ASSERT_EQ(own, first) << "rank " << rank;
    }
    const job::HostTraffic traffic = offline.traffic({{}})[0];
    EXPECT_EQ(traffic.problem, "") << dtype;
    EXPECT_EQ(static_cast<int64_t>(traffic.between()), expected) << dtype;
    EXPECT_EQ(std::accumulate(traffic.received.begin(), traffic.received.end(), uint64_t{0}), traffic.between());
  }
}

// The same for inexact collectives, by the second table: the sum of each other host passes once to the rank that owns a
// part, and a result of an all_reduce or a part of a gather once to each other host; as integers of 8 or 4 bits, with 4
// bytes per 128 or 64 of them, or not rounded.
TEST_P(SimulatedStrategyTest, HostsExchangeWhatTheTableSaysInInexactCollectives) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "MPI was not found";
  constexpr int kHosts = 128, kRanks = 8, kWorld = kHosts * kRanks;
  const auto encoded = [](int bits, int64_t count) {
    const int64_t block = bits == 8 ? 128 : 64;
    return (count + block - 1) / block * 4 + (count * bits + 7) / 8;
  };
  struct Choice {
    std::string keys;
    int gradient_bits, weight_bits;  // 0: not rounded
  };
  for (const Choice& choice : {Choice{"communicator.exact=false", 0, 0},
                               {"communicator.gradients=int4", 4, 0},
                               {"communicator.weights=int8", 0, 8}}) {
    if (choice.weight_bits != 0 && GetParam() != "zero3") continue;  // the others do not gather weights to use them
    const bool sums_per_host = choice.weight_bits == 0;
    std::vector<std::string> keys{"strategy=" + GetParam(),
                                  "strategy." + GetParam() + ".bucket_bytes=512KiB",
                                  "train.dtype=bf16",
                                  "gradients.reduce=last_micro_step",
                                  "train.gradient_accumulation=2",
                                  "communicator=mpi",
                                  "communicator.mpi.hierarchy_min_bytes=0",
                                  choice.keys};
    if (GetParam() == "zero3") keys.emplace_back("strategy.zero3.persistence_threshold=1000");
    const plugin::ResolvedJob of = job(kWorld, keys);
    // Of the largest parameter, each rank has more elements than a gather leaves exact.
    job::OfflinePlan offline(of, blocks_of(1, 640), kWorld, job::HostSizes(kHosts, kRanks));
    int64_t expected = 0;
    bool rounds = false;
    std::vector<uint64_t> first;
    simulate(of, offline.plan(0), [&](const zr_coll& coll) {
      first.push_back(comm::fingerprint_of(coll, kWorld));
      const bool is_gradient = (coll.flags & ZR_COLL_GRADIENTS) != 0, is_weight = (coll.flags & ZR_COLL_WEIGHTS) != 0;
      const int bits = is_gradient ? choice.gradient_bits : is_weight ? choice.weight_bits : 0;
      rounds |= bits != 0;
      const int64_t result = size_of(static_cast<zr_dtype>(coll.dst.dtype));
      const auto bytes = [&](int64_t count, int64_t width) { return bits ? encoded(bits, count) : width * count; };
      if (coll.op == ZR_ALL_REDUCE) {
        EXPECT_TRUE(sums_per_host);
        expected += (bytes(coll.src.count, 4) + bytes(coll.src.count, result)) * (kHosts - 1);
        return;
      }
      for (int rank = 0; rank < kWorld; ++rank) {
        const int64_t part = comm::part_of_rank(coll.counts, comm::total_of(coll, kWorld), rank, kWorld).count;
        const bool is_sum = coll.op == ZR_REDUCE_SCATTER;
        expected += (is_sum || part >= 128 ? bytes(part, is_sum ? 4 : result) : result * part) * (kHosts - 1);
        // A sum in rank order returns from the last host.
        if (is_sum && !sums_per_host && rank / kRanks != kHosts - 1) expected += result * part;
      }
    });
    for (int rank = 1; rank < kWorld; ++rank) {
      std::vector<uint64_t> own;
      simulate(of, offline.plan(rank), [&](const zr_coll& coll) { own.push_back(comm::fingerprint_of(coll, kWorld)); });
      ASSERT_EQ(own, first) << "rank " << rank;
    }
    EXPECT_EQ(rounds, choice.gradient_bits != 0 || choice.weight_bits != 0) << choice.keys;
    const job::HostTraffic traffic = offline.traffic({offline.inexact_collectives()})[0];
    EXPECT_EQ(traffic.problem, "") << choice.keys;
    EXPECT_EQ(static_cast<int64_t>(traffic.between()), expected) << choice.keys;
    EXPECT_EQ(std::accumulate(traffic.received.begin(), traffic.received.end(), uint64_t{0}), traffic.between());
  }
}

// A job whose hosts each have one copy of the weights: a rank counts its part of the copy, and each host receives what
// the others have updated.
TEST_P(SimulatedStrategyTest, HostsReceiveSharedWeightsOnce) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "MPI was not found";
  const job::HostSizes hosts{3, 1, 4};
  std::vector<std::string> keys{"strategy=" + GetParam(), "strategy." + GetParam() + ".bucket_bytes=256KiB",
                                "communicator=mpi", "communicator.mpi.hierarchy_min_bytes=0", "train.dtype=bf16"};
  if (GetParam() == "zero3") keys.emplace_back("strategy.zero3.shard_within=host");
  const plugin::ResolvedJob of = job(8, keys);
  const std::vector<plan::Parameter> parameters = blocks_of(3, 160);
  job::OfflinePlan offline(of, parameters, 8, hosts);
  if (GetParam() == "zero0") {  // every rank updates all weights
    const plan::MemoryPlan plan = offline.plan(0);
    EXPECT_TRUE(std::ranges::none_of(plan.rank_plan.buffers, [](const plan::Buffer& b) { return b.shared; }));
    return;
  }
  int64_t all = 0, trainable = 0, received = 0, counted = 0;
  for (const plan::Parameter& p : parameters) {
    all += p.count;
    trainable += p.frozen ? 0 : p.count;
  }
  for (int rank = 0; rank < 8; ++rank) {
    const plan::MemoryPlan plan = offline.plan(rank);
    EXPECT_TRUE(plan.input.share_weights);
    for (const plan::Buffer& buffer : plan.rank_plan.buffers)
      if (buffer.shared) counted += buffer.bytes(plan.input.location_of(rank));
    const comm::CommVolumeCounter counter(rank, 8, 3);
    simulate(of, plan, [&](const zr_coll& coll) {
      if (coll.op != ZR_ALL_GATHER) return;
      EXPECT_TRUE(coll.flags & ZR_COLL_SHARED);
      received += counter.received_bytes(coll);
    });
  }
  const plan::StepCommunication communication = offline.plan(0).communication();
  EXPECT_EQ(communication.weights.bytes(), 2 * trainable * 2);
  EXPECT_EQ(communication.gathers.bytes(), 0);
  EXPECT_GE(counted, 3 * 2 * all);
  EXPECT_LT(counted, 3 * 2 * all + 3 * 64 * static_cast<int64_t>(parameters.size()) * 2) << "padding";
  EXPECT_GE(received, communication.weights.bytes());
  EXPECT_LT(received, communication.weights.bytes() + 2 * 64 * static_cast<int64_t>(parameters.size()) * 2)
      << "padding";
  EXPECT_EQ(offline.traffic({{}})[0].problem, "");
}

TEST_F(SimulatedStepTest, ShardsWithinHostsOnlyIfTheirRanksShareWeights) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "MPI was not found";
  // What follows the name and the file of the plug-in.
  const auto planned = [&](std::vector<std::string> keys, const job::HostSizes& hosts) {
    keys.insert(keys.end(), {"strategy=zero3", "strategy.zero3.shard_within=host", "communicator=mpi"});
    const plugin::ResolvedJob of = job(4, keys);
    const std::string text = failure_of([&] { job::OfflinePlan(of, blocks_of(1, 64), 4, hosts).plan(0); });
    return text.empty() ? text : text.substr(text.find("strategy.zero3"));
  };
  const auto problem = [](const std::string& obstacle) {
    return "strategy.zero3.shard_within = \"host\" needs weights that the ranks of a host share, but " + obstacle +
           "; change that, or remove the key";
  };
  EXPECT_EQ(planned({}, {2, 2}), "");
  EXPECT_EQ(planned({}, {4}), "") << "as shard_within = job";
  EXPECT_EQ(planned({}, {1, 1, 1, 1}), problem("every host has one rank"));
  EXPECT_EQ(planned({"communicator.share_weights=false"}, {2, 2}), problem("communicator.share_weights is false"));
  EXPECT_EQ(planned({"communicator.mpi.hierarchy=false"}, {2, 2}), problem("communicator.mpi.hierarchy is false"));
  EXPECT_EQ(planned({"communicator.weights=int8"}, {2, 2}),
            problem("communicator.weights rounds the weights that are gathered"));
  EXPECT_EQ(planned({"memory.device_budget=1GiB"}, {2, 2}), problem("memory.device_budget is set"));
  EXPECT_EQ(planned({"offload.parameters=cpu"}, {2, 2}), problem("offload.parameters selects a tier"));
  EXPECT_EQ(planned({"job.device=cuda"}, {2, 2}), problem("job.device is \"cuda\""));
  EXPECT_EQ(planned({"optimizer=onebit_adam"}, {2, 2}),
            problem("optimizer 'onebit_adam' uses gradients that are not reduced over ranks"));
}

// Of the compressed elements that this rank serves.
int64_t compressed_bytes(const plan::MemoryPlan& plan) {
  int64_t words = 0;
  for (const auto& ranges : plan::local_plan(plan).ranges)
    for (const plan::ServedRange& range : ranges)
      for (int64_t first = 0; range.rank == plan.rank && first < range.count; first += 1024)
        words += 1 + (std::min<int64_t>(1024, range.count - first) + 31) / 32;
  return 4 * words;
}

// 1-bit Adam after its warm-up: every rank sends a word per 32 elements and a scale per 1024 to the rank that serves
// them, which sends as many to all ranks: these pass to each host once. Weights are not gathered.
TEST_F(SimulatedStepTest, StepsWithLocalGradientsExchangeCompressedMomentum) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "MPI was not found";
  const auto check = [&](const job::HostSizes& hosts, const std::string& strategy, const std::string& freeze_step) {
    const int world = std::accumulate(hosts.begin(), hosts.end(), 0);
    const plugin::ResolvedJob of =
        job(world, {"strategy=" + strategy, "optimizer=onebit_adam", "optimizer.onebit_adam.freeze_step=" + freeze_step,
                    "communicator=mpi", "communicator.mpi.hierarchy_min_bytes=0"});
    job::OfflinePlan offline(of, blocks_of(3, 160), world, hosts);
    const job::HostTraffic traffic = offline.local_traffic();
    ASSERT_EQ(traffic.problem, "") << strategy;
    int64_t from_other_hosts = 0, message = 0;
    int rank = 0;
    for (const int ranks_of_host : hosts)
      for (int i = 0; i < ranks_of_host; ++i, ++rank) {
        const int64_t served = compressed_bytes(offline.plan(rank));
        from_other_hosts += served * (world - ranks_of_host);
        message += served;
      }
    EXPECT_EQ(offline.plan(0).communication().local, 2 * message * (world - 1)) << strategy;
    EXPECT_EQ(static_cast<int64_t>(traffic.between()),
              from_other_hosts + message * (static_cast<int64_t>(hosts.size()) - 1))
        << strategy;
    EXPECT_EQ(std::accumulate(traffic.received.begin(), traffic.received.end(), uint64_t{0}), traffic.between());
    // Every rank issues the same collectives, and receives its part of what the plan says.
    const plan::MemoryPlan all = offline.plan_with_segments();
    std::vector<uint64_t> first;
    int64_t received = 0;
    for (rank = 0; rank < world; ++rank) {
      plan::MemoryPlan own_plan = offline.plan(rank);
      own_plan.segments = all.segments;
      std::vector<uint64_t> own;
      const comm::CommVolumeCounter counter(rank, world, 1);
      const auto count = [&](const zr_coll& coll) {
        own.push_back(comm::fingerprint_of(coll, world));
        received += counter.received_bytes(coll);
      };
      simulate(of, own_plan, count, job::SimulatedStep::local_gradients);
      if (rank == 0) first = own;
      ASSERT_EQ(own, first) << "rank " << rank;
    }
    EXPECT_EQ(received, offline.plan(0).communication().local) << strategy;
  };
  for (const std::string strategy : {"zero0", "zero1", "zero2"}) {
    for (const std::string freeze_step : {"20", "0"}) check({3, 1, 4}, strategy, freeze_step);
    check(job::HostSizes(128, 8), strategy, "20");
  }
}

// Of the bytes that zero0 sends between two hosts. Each rank's signs pass to the other host, but only one sum per host
// does under zero0, so the share grows with the ranks on a host.
TEST_F(SimulatedStepTest, CompressedMomentumTakesAFractionOfTheBytesBetweenHosts) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "MPI was not found";
  for (const auto& [ranks, dtype, least] :
       {std::tuple{1, "fp32", 28.0}, {1, "bf16", 21.0}, {2, "fp32", 20.0}, {2, "bf16", 20.0}, {4, "fp32", 12.0}}) {
    const auto between = [&](const std::string& optimizer, auto&& traffic) {
      const plugin::ResolvedJob of =
          job(2 * ranks, {"strategy=zero0", "optimizer=" + optimizer, std::string("train.dtype=") + dtype,
                          "communicator=mpi", "communicator.mpi.hierarchy_min_bytes=0"});
      job::OfflinePlan offline(of, blocks_of(3, 320), 2 * ranks, job::HostSizes(2, ranks));
      return static_cast<double>(traffic(offline).between());
    };
    const double exact = between("adamw", [](job::OfflinePlan& offline) { return offline.traffic({{}})[0]; });
    const double compressed = between("onebit_adam", [](job::OfflinePlan& offline) { return offline.local_traffic(); });
    EXPECT_GE(exact / compressed, least) << ranks << " " << dtype;
    EXPECT_LE(exact / compressed, least * 1.15) << ranks << " " << dtype;
  }
}

// Each rank updates its copy of all weights, with second moments and masters of which a host has one copy.
TEST_F(SimulatedStepTest, HostsHaveOneCopyOfMastersAndFrozenStates) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "MPI was not found";
  const job::HostSizes hosts{3, 1, 4};
  const std::vector<plan::Parameter> parameters = blocks_of(3, 160);
  int64_t trainable = 0;
  for (const plan::Parameter& p : parameters) trainable += p.frozen ? 0 : p.count;
  // Elements that all ranks together count.
  const auto counted = [&](std::vector<std::string> keys) {
    keys.insert(keys.end(), {"optimizer=onebit_adam", "communicator=mpi", "train.dtype=bf16"});
    const plugin::ResolvedJob of = job(8, keys);
    const job::OfflinePlan offline(of, parameters, 8, hosts);
    int64_t elements = 0;
    for (int rank = 0; rank < 8; ++rank)
      for (const plan::LocalArray& array : plan::local_plan(offline.plan(rank)).arrays)
        if (array.tag == "exp_avg_sq, all" || array.tag == "fp32 master weights, all") elements += array.counted;
    return elements;
  };
  for (const std::string strategy : {"zero1", "zero2"}) {
    const std::string key = "strategy=" + strategy;
    EXPECT_EQ(counted({key}), 2 * 3 * trainable);
    EXPECT_EQ(counted({key, "communicator.share_weights=false"}), 2 * 3 * trainable);
    EXPECT_EQ(counted({key, "memory.device_budget=1GiB"}), 2 * 8 * trainable);
    EXPECT_EQ(counted({key, "communicator.mpi.hierarchy=false"}), 2 * 8 * trainable);
  }
  EXPECT_EQ(counted({"strategy=zero0"}), 0) << "each rank has all states";
}

TEST_F(SimulatedStepTest, OtherOptimizersHaveNoStepsWithLocalGradients) {
  const plugin::ResolvedJob of = job(2, {"strategy=zero1", "communicator=shm"});
  const job::HostTraffic traffic = job::OfflinePlan(of, blocks_of(1, 64), 2, {2}).local_traffic();
  EXPECT_EQ(traffic.problem, "");
  EXPECT_EQ(traffic.inside, 0u);
}

INSTANTIATE_TEST_SUITE_P(Strategies, SimulatedStrategyTest, ::testing::Values("zero0", "zero1", "zero2", "zero3"),
                         [](const auto& info) { return info.param; });

// A sink that fails ends the simulation with its error.
TEST_F(SimulatedStepTest, PassesTheErrorOfTheSinkOn) {
  const plugin::ResolvedJob of = job(2, {"strategy=zero1", "communicator=shm"});
  const job::OfflinePlan offline(of, blocks_of(1, 64), 2);
  EXPECT_EQ(failure_of([&] { simulate(of, offline.plan(0), [](const zr_coll&) { fail_user("no more"); }); }),
            "no more");
}

// A strategy may write to buffers of 64 GiB, and wait for its own threads: nothing is stored.
TEST_F(SimulatedStepTest, PlansAModelThatDoesNotFit) {
  constexpr int64_t kElements = int64_t{1} << 34;
  for (const std::string strategy : {"zero1", "busy"}) {
    const plugin::ResolvedJob of = job(4, {"strategy=" + strategy, "communicator=shm"});
    const job::OfflinePlan offline(of, {{"w", {}, {kElements}, kElements}}, 4);
    int64_t collectives = 0;
    simulate(of, offline.plan(0), [&](const zr_coll&) { ++collectives; });
    EXPECT_GE(collectives, 2) << strategy;
  }
}

TEST_F(SimulatedStepTest, PassesTheErrorOfTheStrategyOn) {
  const plugin::ResolvedJob of = job(2, {"strategy=busy", "strategy.busy.fails=true", "communicator=shm"});
  job::OfflinePlan offline(of, blocks_of(1, 64), 2, {2});
  EXPECT_NE(failure_of([&] { offline.traffic({{}}); }).find("bind() fails on purpose"), std::string::npos);
}

TEST_F(SimulatedStepTest, StrategiesThatCannotGatherAreRejected) {
  const plugin::ResolvedJob of = job(2, {"strategy=halves", "communicator=shm"});
  job::OfflinePlan offline(of, blocks_of(1, 64), 2, {2});
  EXPECT_NE(failure_of([&] { offline.traffic({{}}); }).find("and cannot gather it before its use"), std::string::npos);
}

// The engine would compose its reductions, whose bytes the communicator cannot know.
TEST_F(SimulatedStepTest, TrafficOfComposedOperationsIsUnknown) {
  const plugin::ResolvedJob of = job(2, {"strategy=zero1", "communicator=poor"});
  job::OfflinePlan offline(of, blocks_of(1, 64), 2, {2});
  EXPECT_EQ(offline.traffic({{}})[0].problem, "communicator 'poor' does not plan the bytes of its collectives");
}

}  // namespace
}  // namespace zr::testing
