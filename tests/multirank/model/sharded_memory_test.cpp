// How much memory a rank with sharded parameters holds, and what works with little memory.
#include <sys/resource.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "multirank/model/sharded_parameters.hpp"
#include "support/sanitizers.hpp"
#include "zr/recompute.hpp"

namespace {

using namespace sharded_tests;
using testing::HasSubstr;
using testing::Not;

// This rank's part of the memory that ranks share, in bytes: Pss, which divides a page by the number of its mappings.
int64_t proportional_bytes() {
  std::ifstream maps("/proc/self/smaps");
  bool shared = false;
  int64_t kib = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ')) shared = line.find("memfd:zeroth") != line.npos;
    if (shared && line.rfind("Pss:", 0) == 0) kib += std::stoll(line.substr(4));
  }
  return kib * 1024;
}

// The same for all memory except files, because the Pss of a library depends on which other processes run.
int64_t proportional_bytes_of_all() {
  std::ifstream maps("/proc/self/smaps_rollup");
  int64_t kib = 0;
  for (std::string line; std::getline(maps, line);)
    for (const std::string field : {"Pss_Anon:", "Pss_Shmem:"})
      if (line.rfind(field, 0) == 0) kib += std::stoll(line.substr(field.size()));
  if (kib == 0) throw std::runtime_error("/proc/self/smaps_rollup has no Pss_Anon");
  return kib * 1024;
}

RANK_BODY(prints_shared_memory, Run) {
  run.engine.reset();
  auto net =
      zr::deferred([] { return torch::nn::Sequential(torch::nn::Linear(1024, 2048), torch::nn::Linear(2048, 1024)); });
  zr::Engine engine(run.program, *net);
  engine.backward(net->forward(torch::randn({4, 1024})).square().mean());
  engine.step();
  engine.mean(0);  // waits until every rank has finished its step
  const double shared = engine.mean(static_cast<double>(proportional_bytes())) * engine.world(),
               all = engine.mean(static_cast<double>(proportional_bytes_of_all())) * engine.world();
  engine.mean(0);
  if (engine.rank() == 0) std::cout << static_cast<int64_t>(shared) << " " << static_cast<int64_t>(all) << std::endl;
}

TEST_F(ShardedParametersTest, HostHoldsSharedWeightsOnce) {
  ONE_HOST_ONLY("all ranks share one copy of the weights");
  if (zr::test::kSanitized) GTEST_SKIP() << zr::test::kSanitizerMemory;
  const double weights = 4.0 * (2 * 1024 * 2048 + 2048 + 1024);
  struct Held {
    double shared, all;  // bytes of both ranks: in shared memory, and in total
  };
  const auto held = [&](const std::string& strategy, const std::string& alias) {
    const Result result = run(prints_shared_memory, strategy,
                              "strategy." + strategy + ".bucket_bytes=64KiB communicator.share_weights=" + alias);
    EXPECT_EQ(result.code, 0) << result.output;
    Held bytes{};
    std::istringstream(said(result)) >> bytes.shared >> bytes.all;
    return bytes;
  };
  for (const std::string strategy : {"zero1", "zero2"}) {
    const Held copied = held(strategy, "false"), aliased = held(strategy, "true");
    EXPECT_NEAR((copied.shared - aliased.shared) / weights, 1, 0.02) << strategy << ": one copy fewer with two ranks";
    EXPECT_NEAR((copied.all - aliased.all) / weights, 1, 0.25) << strategy << ": no copy elsewhere";
  }
  // zero3 has the same reduced gradients and buckets as zero2, and no all-gather buffer.
  const Held zero2 = held("zero2", "true"), zero3 = held("zero3", "true");
  EXPECT_NEAR(zero3.shared / zero2.shared, 1, 0.02) << "zero3 also holds the weights once";
  EXPECT_NEAR((zero3.all - zero2.all) / weights, 0, 0.25);
}

// Gathers weights of 24 MiB at once; the all-gather buffer has capacity for one of the three.
RANK_BODY(gathers_all, Run) {
  run.engine.reset();
  auto net = zr::deferred([] {
    return torch::nn::Sequential(torch::nn::Linear(1024, 2048), torch::nn::Linear(2048, 1024),
                                 torch::nn::Linear(1024, 2048));
  });
  zr::Engine engine(run.program, *net);
  const auto scope = zr::gather(net->parameters());
  std::cout << net->parameters().size() << " parameters gathered" << std::endl;
}

TEST_F(ShardedParametersTest, CountsWeightsGatheredOutsideTheBufferAgainstTheBudget) {
  const Result free = run(gathers_all);
  EXPECT_EQ(free.code, 0) << free.output;
  EXPECT_THAT(free.output, HasSubstr("6 parameters gathered"));
  const Result bounded = run(gathers_all, "zero3", "memory.device_budget=44MB");
  EXPECT_EQ(bounded.code, 2) << bounded.output;
  EXPECT_THAT(bounded.output, HasSubstr("memory.device_budget is "));
  EXPECT_THAT(bounded.output, Not(HasSubstr("6 parameters gathered")));
}

// Trains a deep model of cheap blocks; the test reads the peak of the activations from the summary.
void prints_activations(Run& run, bool recompute) {
  run.engine.reset();
  std::vector<torch::nn::Linear> lines;
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(lines.emplace_back(torch::nn::Linear(64, 64)));
  zr::Engine engine(run.program, *net);
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(step);
    auto x = torch::randn({2048, 64});
    for (auto& line : lines) {
      auto block = [line](const torch::Tensor& y) mutable {
        return torch::dropout(torch::gelu(line(y)), 0.1, true).tanh() + y;
      };
      x = recompute ? zr::checkpoint(block, x) : block(x);
    }
    engine.backward(x.square().mean());
    engine.step();
  }
  engine.finish();
  std::cout << engine.weights_hash() << std::endl;
}

const zr::test::RankBodyOf<Run> keeps_activations("keeps_activations",
                                                  [](Run& run) { prints_activations(run, false); });

const zr::test::RankBodyOf<Run> recomputes_activations("recomputes_activations",
                                                       [](Run& run) { prints_activations(run, true); });

TEST_F(ShardedParametersTest, RecomputedBlocksHoldFewerActivationsAndAreBitIdentical) {
  const auto most = [&](const zr::test::RankBody& body, const std::string& strategy) {
    const Result result = run(body, strategy, "job.name=" + body.name() + " train.steps=2");
    EXPECT_EQ(result.code, 0) << result.output;
    const auto summary = nlohmann::json::parse(std::ifstream(folder_ / body.name() / "summary.json"));
    return std::pair(said(result), summary["memory"]["device"]["activations"]["peak"].get<double>());
  };
  for (const std::string strategy : {"zero0", "zero3"}) {
    const auto [hash, kept] = most(keeps_activations, strategy);
    const auto [same, dropped] = most(recomputes_activations, strategy);
    EXPECT_EQ(same, hash);
    EXPECT_LT(dropped, 0.5 * kept) << strategy;
  }
}

// Builds a model of 64 MiB in a process that may allocate only 40 MiB more.
void build_under_cap(Run& run, bool deferred) {
  run.engine.reset();
  std::ifstream status("/proc/self/status");
  rlim_t data = 0;
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmData:", 0) == 0) data = std::stoull(line.substr(7)) * 1024;
  const rlimit limit{data + (40u << 20), data + (40u << 20)};
  EXPECT_TRUE(data > 0 && ::setrlimit(RLIMIT_DATA, &limit) == 0) << "the limit is set";
  const auto build = [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 16; ++i) net->push_back(torch::nn::Linear(1024, 1024));
    return net;
  };
  auto net = deferred ? zr::deferred(build) : build();
  zr::Engine engine(run.program, *net);
  engine.backward(net->forward(torch::ones({4, 1024})).square().mean());
  engine.step();
  std::cout << engine.weights_hash().size() << std::endl;
  // The limit does not count shared memory.
  EXPECT_LT(engine.mean(static_cast<double>(proportional_bytes())), 48 << 20)
      << "a rank's part of shared memory is small";
}

const zr::test::RankBodyOf<Run> builds_under_cap("builds_under_cap", [](Run& run) { build_under_cap(run, false); });

const zr::test::RankBodyOf<Run> builds_deferred_under_cap("builds_deferred_under_cap",
                                                          [](Run& run) { build_under_cap(run, true); });

TEST_F(ShardedParametersTest, DeferredModelIsNeverUnshardedInMemory) {
  if (zr::test::kSanitized) GTEST_SKIP() << zr::test::kSanitizerMemory;
  const std::string how = "strategy.zero3.prefetch_bytes=1MiB train.steps=1";
  const Result plain = launch(4, builds_under_cap, how), deferred = launch(4, builds_deferred_under_cap, how);
  EXPECT_NE(plain.code, 0) << "64 MiB do not fit into 40";
  EXPECT_THAT(plain.output, HasSubstr("memory"));
  EXPECT_EQ(deferred.code, 0) << deferred.output;
}

// Takes memory on the last rank only, until less than a tensor of the models below is left: of memory.device_budget if
// it is set, else by a lower data limit for the process.
class Scarcity {
 public:
  explicit Scarcity(const zr::Engine& engine, bool budget) {
    if (engine.rank() != engine.world() - 1) return;
    if (budget) {
      for (int64_t bytes : {16 << 20, 1 << 20}) try {
          while (true) taken_.push_back(torch::empty({bytes}, torch::kByte));
        } catch (const std::exception&) {  // less than `bytes` is left
        }
      return;
    }
    std::ifstream status("/proc/self/status");
    rlim_t data = 0;
    for (std::string line; std::getline(status, line);)
      if (line.rfind("VmData:", 0) == 0) data = std::stoull(line.substr(7)) * 1024;
    ::getrlimit(RLIMIT_DATA, &before_);
    const rlimit limit{data + (8u << 20), before_.rlim_max};
    EXPECT_TRUE(data > 0 && ::setrlimit(RLIMIT_DATA, &limit) == 0) << "the limit is set";
    limits_ = true;
  }
  ~Scarcity() {
    if (limits_) ::setrlimit(RLIMIT_DATA, &before_);
  }
  Scarcity(const Scarcity&) = delete;

 private:
  std::vector<torch::Tensor> taken_;
  bool limits_ = false;
  rlimit before_{};
};

// The last rank has no memory for weights of 40 MiB each; no allocator caches blocks of that size.
RANK_BODY(releases_without_memory, Run) {
  run.engine.reset();
  const auto build = [] {
    torch::manual_seed(7);
    return torch::nn::Sequential(torch::nn::Linear(1024, 10 << 10), torch::nn::Linear(10 << 10, 1024));
  };
  const auto step = [](torch::nn::Sequential& net, zr::Engine& engine) {
    torch::manual_seed(engine.step_index());
    engine.backward(net->forward(torch::randn({2, 1024}).to(engine.dtype())).to(torch::kFloat).square().mean());
    engine.step();
  };
  auto net = build();
  auto engine = std::make_unique<zr::Engine>(run.program, *net);
  step(net, *engine);
  const std::string last = std::to_string(engine->world() - 1);
  const bool is_bf16 = engine->dtype() != torch::kFloat;
  if (run.program.text("job.name") != "plenty") {
    std::string error;
    try {
      const Scarcity scarcity(*engine, run.program.integer("memory.device_budget") > 0);
      is_bf16 ? engine->release(torch::kFloat) : engine->release();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    EXPECT_TRUE(error.rfind("engine.release(): rank " + last + " cannot allocate memory for the full model: ", 0) ==
                    0 &&
                error.find("; the engine is unchanged; free memory, ") != error.npos)
        << "every rank says which one lacks memory: " + error;
  }
  step(net, *engine);
  const torch::Tensor weight = engine->get("1.weight");
  const std::string hash = engine->weights_hash();
  if (engine->rank() == 0) std::cout << hash << std::endl;
  engine->release();
  EXPECT_TRUE(net->named_parameters()["1.weight"].equal(weight.to(is_bf16 ? torch::kBFloat16 : torch::kFloat)))
      << "release() succeeds when memory is available";
}

TEST_F(ShardedParametersTest, SLOW_ReleaseWithoutMemoryOnOneRankFailsOnAllAndTrainingContinues) {
  if (zr::test::kSanitized) GTEST_SKIP() << zr::test::kSanitizerMemory;
  const std::string shared = "zero1 communicator.share_weights=true", bounded = "zero3 memory.device_budget=2GiB";
  const std::map<std::string, std::vector<std::string>> all{{"fp32", {"zero0", shared, "zero3", bounded}},
                                                            {"bf16", {shared}}};
  for (const auto& [dtype, strategies] : all) {
    const std::string how = " train.dtype=" + dtype;
    const Result plenty = run(releases_without_memory, "zero0", "job.name=plenty" + how);
    EXPECT_EQ(plenty.code, 0) << plenty.output;
    for (const std::string& strategy : strategies) {
      const Result result = run(releases_without_memory, strategy, how);
      EXPECT_EQ(result.code, 0) << strategy << how << "\n" << result.output;
      EXPECT_EQ(said(result), said(plenty)) << strategy << how;
    }
  }
}

// The last rank has no memory for a copy of a buffer of 40 MiB, which refresh() makes.
RANK_BODY(refreshes_without_memory, Run) {
  run.engine.reset();
  torch::manual_seed(5);
  run.net = std::make_shared<Net>();
  run.net->register_buffer("table", torch::ones({10 << 20}));
  run.engine = std::make_unique<zr::Engine>(run.program, *run.net);
  zr::Engine& engine = *run.engine;
  run.step();
  const torch::Tensor weight = engine.get("first.weight");
  torch::manual_seed(6);
  run.net->register_module("added", torch::nn::Linear(64, 64));
  if (run.program.text("job.name") != "plenty") {
    std::string error;
    try {
      const Scarcity scarcity(engine, run.program.integer("memory.device_budget") > 0);
      engine.refresh();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    const int last = engine.world() - 1;
    const bool names = error.rfind("engine.refresh() failed on rank " + std::to_string(last) + ": ", 0) == 0;
    EXPECT_TRUE(!error.empty() && names == (engine.rank() != last))
        << "every rank has the error of the last one: " + error;
    EXPECT_TRUE(error.find("41943040 bytes") != error.npos || error.find("requests 40.00 MiB more") != error.npos)
        << "the copy is what fails: " + error;
    EXPECT_TRUE(engine.step_index() == 1 && torch::equal(engine.get("first.weight"), weight)) << "nothing was changed";
  }
  engine.refresh();
  run.step();
  engine.get("added.weight");
  const std::string hash = engine.weights_hash();
  if (engine.rank() == 0) std::cout << hash << std::endl;
}

TEST_F(ShardedParametersTest, RefreshWithoutMemoryOnOneRankFailsOnAllAndChangesNothing) {
  if (zr::test::kSanitized) GTEST_SKIP() << zr::test::kSanitizerMemory;
  const Result plenty = run(refreshes_without_memory, "zero0", "job.name=plenty");
  EXPECT_EQ(plenty.code, 0) << plenty.output;
  for (const std::string strategy :
       {"zero0", "zero1 communicator.share_weights=true", "zero3", "zero3 memory.device_budget=2GiB"}) {
    const Result result = run(refreshes_without_memory, strategy);
    EXPECT_EQ(result.code, 0) << strategy << "\n" << result.output;
    EXPECT_EQ(said(result), said(plenty)) << strategy;
  }
}

}  // namespace
