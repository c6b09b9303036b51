// The plan, the memory and the communication of a run, and the effect of a budget, on the gpt example.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "support/multirank.hpp"
#include "support/name_by_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using Json = nlohmann::json;
using zr::testing::shell;

const std::string kBin = ZR_BUILD_DIR "/bin/";

int64_t bytes_of(const std::string& number, const std::string& unit) {
  static const std::map<std::string, double> units{{"B", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}};
  return static_cast<int64_t>(std::stod(number) * units.at(unit));
}

class MemoryTest : public testing::Test {
 protected:
  MemoryTest() {
    std::string text;
    while (text.size() < 20000)
      text += "to be or not to be, that is the question " + std::to_string(text.size()) + "\n";
    scratch_.write("a.txt", text);
    scratch_.write(
        "gpt.toml",
        "[job]\nprogram = \"gpt\"\nthreads = 1\nranks = 2\n[model]\nlayers = 2\nwidth = 64\nheads = 2\n"
        "context = 16\n[train]\nsteps = 3\nmicro_batch = 8\n[data]\ntext = \"a.txt\"\n[sample]\nlength = 0\n");
  }
  auto zeroth(const std::string& words) const {
    return shell("cd " + scratch_.folder().string() + " && env -u ZR_PLUGIN_PATH " + kBin + "zeroth " + words);
  }
  auto plan(const std::string& overrides) const { return zeroth("plan gpt.toml " + overrides); }
  auto train(const std::string& overrides) const { return zeroth("train gpt.toml " + overrides); }
  Json summary(const std::string& name = "gpt") const {
    return Json::parse(std::ifstream(scratch_.path("runs/" + name + "/summary.json")), nullptr, false);
  }
  // The lines that an error suggests, as overrides.
  static std::vector<std::string> edits(const std::string& said) {
    std::vector<std::string> all;
    if (said.find("the job fits with any one of these lines:") == said.npos) return all;
    std::istringstream lines(said.substr(said.find("the job fits with any one of these lines:")));
    std::string line;
    std::getline(lines, line);
    const std::regex edit("  (.*\\S) +saves [0-9.]+ [KMG]?i?B, needs ([0-9.]+) ([KMG]?i?B)");
    for (std::smatch found; std::getline(lines, line) && std::regex_match(line, found, edit);) {
      std::string overrides = std::regex_replace(found[1].str(), std::regex(" = "), "=");
      all.push_back(std::regex_replace(overrides, std::regex("\",? ?|, "), " "));
      all.back() = std::regex_replace(all.back(), std::regex("= "), "=");
    }
    return all;
  }
  const zr::test::Scratch scratch_;
};

// Removes the rank that the launcher writes before each line.
std::string plain(const std::string& output) {
  return std::regex_replace(output, std::regex("(^|\n)\\[\\d+\\] "), "$1");
}

// Bytes by memory kind, from the lines of a plan; the communication under "comm bytes".
std::map<std::string, int64_t> kinds(const std::string& plan) {
  std::map<std::string, int64_t> bytes;
  std::istringstream lines(plan);
  const std::regex holds("  (\\w+) .* ([0-9.]+) ([KMG]?i?B)"),
      moves("  communication .* (\\d+) x (\\d+) x (\\d+) x (\\d+) .*");
  std::smatch found;
  for (std::string line; std::getline(lines, line);)
    if (std::regex_match(line, found, moves)) {
      bytes["comm bytes"] += std::stoll(found[1]) * std::stoll(found[2]) * std::stoll(found[3]) * std::stoll(found[4]);
    } else if (std::regex_match(line, found, holds)) {
      bytes[found[1]] += bytes_of(found[2], found[3]);
    }
  return bytes;
}

class MemoryPlanTest : public MemoryTest, public ::testing::WithParamInterface<std::string> {};

TEST_P(MemoryPlanTest, PredictsARun) {
  const std::string strategy = GetParam();
  for (const std::string types : {"train.dtype=fp32", "train.dtype=bf16", "train.dtype=bf16 gradients.dtype=bf16",
                                  "train.dtype=fp32 gradients.reduce=last_micro_step train.gradient_accumulation=2"}) {
    const std::string how = "strategy=" + strategy + " strategy." + strategy + ".bucket_bytes=64KiB " + types;
    const auto planned = plan(how);
    ASSERT_EQ(planned.code, 0) << planned.output;
    EXPECT_NE(planned.output.find("\n  activations    unknown until measured by a run\n"), std::string::npos);
    const auto trained = train(how);
    ASSERT_EQ(trained.code, 0) << trained.output;
    auto said = kinds(planned.output);
    const Json ran = summary();
    for (const auto& [tier, of_tier] : ran["memory"].items())
      for (const auto& [kind, bytes] : of_tier.items()) {
        if (kind == "activations") {
          EXPECT_TRUE(bytes["planned"].is_null()) << "they are unknown before a run, not 0";
          EXPECT_GT(bytes["peak"], 0);
          continue;
        }
        const std::string name = tier == "host" && kind == "communicator" ? "host" : kind;
        EXPECT_NEAR(said[name], bytes["peak"].get<double>(), 0.02 * bytes["peak"].get<double>())
            << how << " " << kind << "\n"
            << planned.output;
      }
    std::ifstream rows(scratch_.path("runs/gpt/metrics.jsonl"));
    for (std::string row; std::getline(rows, row);) {
      const int64_t moved = Json::parse(row)["communication_bytes"];
      if (strategy == "zero3")
        EXPECT_LE(moved, said["comm bytes"]) << how;
      else
        EXPECT_EQ(moved, said["comm bytes"]) << how;
    }
    std::filesystem::remove_all(scratch_.path("runs"));
  }
}
const auto strategy_of = [](const auto& info) { return info.param; };
INSTANTIATE_TEST_SUITE_P(Strategies, MemoryPlanTest, ::testing::Values("zero3"), strategy_of);
INSTANTIATE_TEST_SUITE_P(SLOW_Strategies, MemoryPlanTest, ::testing::Values("zero0", "zero1", "zero2"), strategy_of);

TEST_F(MemoryTest, PlanReportsActivationsThatARunMeasured) {
  ASSERT_EQ(train("").code, 0);
  const auto measured = [&](const std::string& overrides) {
    const std::string said = plan(overrides).output;
    std::smatch found;
    return std::regex_search(said, found,
                             std::regex("\n  activations    measured: .*/runs/gpt +([0-9.]+) ([KMG]?i?B)\n"))
               ? bytes_of(found[1], found[2])
               : 0;
  };
  const int64_t peak = summary()["memory"]["device"]["activations"]["peak"];
  EXPECT_NEAR(measured(""), peak, 0.01 * static_cast<double>(peak));
  EXPECT_EQ(measured("strategy=zero0 job.ranks=4"), measured("")) << "activations do not depend on sharding";
  for (const char* other : {"model.width=128", "train.micro_batch=4", "train.dtype=bf16", "job.name=another"})
    EXPECT_EQ(measured(other), 0) << other << ": measured with other settings";
  const int64_t zero1 = kinds(plan("strategy=zero1").output).at("total");
  const auto fitting = edits(plan("strategy=zero0 memory.device_budget=" + std::to_string(zero1 + peak / 4)).output);
  EXPECT_FALSE(fitting.empty());
  EXPECT_EQ(std::count(fitting.begin(), fitting.end(), "strategy=zero1 "), 0) << "its activations would not fit";
}

TEST_F(MemoryTest, RejectsAPlanOverTheBudgetAndSuggestsEditsThatFit) {
  const auto said = kinds(plan("strategy=zero0").output);
  const std::string budget = " memory.device_budget=" + std::to_string(said.at("total") * 7 / 10);
  for (const char* command : {"plan", "train"}) {
    auto rejected = zeroth(std::string(command) + " gpt.toml strategy=zero0 train.gradient_accumulation=2" + budget);
    rejected.output = plain(rejected.output);
    EXPECT_EQ(rejected.code, 2) << rejected.output;
    for (const char* part : {"zeroth: error: memory.device_budget is ", " (command line), but the plan takes up to ",
                             " per rank, without activations\n", "plan: zero0 + adamw: "})
      EXPECT_NE(rejected.output.find(part), std::string::npos) << part << "\n" << rejected.output;
    const auto fitting = edits(rejected.output);
    ASSERT_EQ(fitting.size(), 3u) << rejected.output;
    for (const std::string& edit : fitting) {
      const auto fits =
          zeroth(std::string("plan gpt.toml strategy=zero0 train.gradient_accumulation=2") + budget + " " + edit);
      EXPECT_EQ(fits.code, 0) << edit << "\n" << fits.output;
    }
    EXPECT_FALSE(std::filesystem::exists(scratch_.path("runs/gpt/metrics.jsonl"))) << "no step was trained";
  }
}

TEST_F(MemoryTest, SLOW_EndsARunWhoseActivationsExceedTheBudgetAndSuggestsEditsThatFit) {
  const std::string base = "strategy=zero0 train.micro_batch=16";
  ASSERT_EQ(train(base).code, 0);
  const Json device = summary()["memory"]["device"];
  int64_t planned = 0;
  for (const auto& [kind, bytes] : device.items())
    planned += kind == "activations" ? 0 : bytes["planned"].get<int64_t>();
  const int64_t activations = device["activations"]["peak"];
  const std::string enough = " memory.device_budget=" + std::to_string(planned + activations * 21 / 20),
                    less = " memory.device_budget=" + std::to_string(planned + activations * 6 / 10);
  EXPECT_EQ(train(base + enough).code, 0);
  auto rejected = train(base + less);
  rejected.output = plain(rejected.output);
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  for (const char* part :
       {"zeroth: error: memory.device_budget is ", ", and libtorch requests ", " more, in the first step\n",
        "\n  weights      planned ", "\n  activations  planned      unknown, held "})
    EXPECT_NE(rejected.output.find(part), std::string::npos) << part << "\n" << rejected.output;
  std::smatch line, one;
  ASSERT_TRUE(std::regex_search(rejected.output, line, std::regex("\n  largest: (.*)\n"))) << rejected.output;
  std::vector<int64_t> largest;
  const std::string holders = line[1];
  const std::regex bytes("([0-9.]+) ([KMG]?i?B)(, |$)");
  for (std::sregex_iterator at(holders.begin(), holders.end(), bytes), end; at != end; ++at)
    largest.push_back(bytes_of((*at)[1], (*at)[2]));
  EXPECT_EQ(largest.size(), 4u) << holders;
  EXPECT_TRUE(std::is_sorted(largest.rbegin(), largest.rend())) << holders;
  const auto fitting = edits(rejected.output);
  ASSERT_EQ(fitting.size(), 3u) << rejected.output;
  for (const std::string& edit : fitting) {
    const auto fits = train(base + less + " " + edit);
    EXPECT_EQ(fits.code, 0) << edit << "\n" << fits.output;
  }
}

// The budget proves it: every allocation beyond the budget fails.
TEST_F(MemoryTest, OffloadedActivationsFreeDeviceMemory) {
  std::filesystem::create_directories(scratch_.path("swap"));
  const std::string
      base = "strategy=zero1 model.width=128 model.context=64 model.dropout=0.1 train.gradient_accumulation=2",
      cpu = base + " offload.activations=cpu",
      nvme = base + " offload.activations=nvme offload.nvme.path=" + scratch_.path("swap");
  const auto first = [](const Json& memory) { return memory["device"]["activations"]["peak"].get<int64_t>(); };
  ASSERT_EQ(train(base).code, 0);
  const Json plain = summary();
  int64_t others = 0;
  for (const auto& [kind, bytes] : plain["memory"]["device"].items())
    others += kind == "activations" ? 0 : bytes["peak"].get<int64_t>();
  const std::string budget = " memory.device_budget=" + std::to_string(others + first(plain["memory"]) * 6 / 10);
  const auto rejected = train(base + budget);
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  for (const std::string& how : {cpu, nvme}) {
    const auto fits = train(how + budget);
    ASSERT_EQ(fits.code, 0) << how << "\n" << fits.output;
    const Json ran = summary();
    EXPECT_EQ(ran["weights_hash"], plain["weights_hash"]) << how;
    EXPECT_LT(first(ran["memory"]), first(plain["memory"]) * 6 / 10) << how;
    const Json& tier = ran["memory"][how == cpu ? "host" : "disk"]["activations"];
    EXPECT_GT(tier["peak"], first(plain["memory"]) / 2) << how;
    std::cout << how << ": device " << first(plain["memory"]) << " -> " << first(ran["memory"]) << ", tier "
              << tier["peak"] << "\n";
  }
}

// CPU time of the commands that have ended, in seconds.
double spent() {
  rusage usage{};
  ::getrusage(RUSAGE_CHILDREN, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Planning takes time in the number of ranks and of strategies, not of parameters: the ratio is 11 on an idle machine.
TEST_F(MemoryTest, PlansATrillionParametersOnAThousandRanksInMoments) {
  double before = spent();
  EXPECT_EQ(zeroth("plan --ranks 2 --params 1e9 --dtype bf16 --compare").code, 0);
  const double small = spent() - before;
  before = spent();
  const auto said = zeroth("plan --ranks 1024 --params 1e12 --dtype bf16 --compare");
  EXPECT_EQ(said.code, 0) << said.output;
  EXPECT_LT(spent() - before, 50 * small) << "all strategies together, compared with two ranks";
  EXPECT_NE(said.output.find("1000000000000 parameters, bf16, gradients reduced in fp32, adamw, 1024 ranks"),
            std::string::npos)
      << said.output;
}

TEST_F(MemoryTest, PlansAModelThatDoesNotFit) {
  // 175 G parameters: 700 GB if they were allocated.
  const auto said = plan("model.layers=96 model.width=12288 model.heads=96 train.dtype=bf16 --ranks 1024 --compare");
  ASSERT_EQ(said.code, 0) << said.output;
  EXPECT_NE(said.output.find("1024 ranks; GB (10^9 bytes) on rank 0"), std::string::npos) << said.output;
}

TEST_F(MemoryTest, PlansASafetensorsFileWithoutTheProgram) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[1000,64],"data_offsets":[0,128000]},)"
      R"("a":{"dtype":"F16","shape":[64],"data_offsets":[128000,128128]}})";
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(header.size() >> (8 * i)));
  scratch_.write("model.safetensors", file + header + std::string(128128, '\0'));
  const auto said = zeroth("plan --safetensors model.safetensors --ranks 2 strategy=zero0");
  ASSERT_EQ(said.code, 0) << said.output;
  EXPECT_NE(said.output.find("64064 parameters, fp16"), std::string::npos) << "the dtype of the file\n" << said.output;
  EXPECT_NEAR(kinds(said.output).at("weights"), 128128, 10) << said.output;
}

TEST_F(MemoryTest, SharesWeightsOnAHostUnlessABudgetOrAKeyPreventsIt) {
  const auto all_gather_bytes = [&](const std::string& overrides) {
    EXPECT_EQ(train("strategy=zero1 " + overrides).code, 0);
    const Json bytes = summary()["communication_bytes"];
    return bytes.contains("all_gather") ? bytes["all_gather"].get<int64_t>() : 0;
  };
  EXPECT_EQ(all_gather_bytes(""), 0);
  EXPECT_GT(all_gather_bytes("memory.device_budget=8GiB"), 0);
  EXPECT_GT(all_gather_bytes("communicator.share_weights=false"), 0);
}

TEST_F(MemoryTest, TrainsRecomputedBlocksBitIdentically) {
  const auto trained = [&](const std::string& overrides) {
    EXPECT_EQ(train(overrides + " model.dropout=0.1").code, 0);
    return summary()["weights_hash"].get<std::string>();
  };
  const std::string hash = trained("strategy=zero0");
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3", "zero3 communicator.share_weights=false"})
    EXPECT_EQ(trained("strategy=" + strategy + " model.recompute=true"), hash) << strategy;
}

TEST_F(MemoryTest, SLOW_TrainsOffloadedActivationsBitIdenticallyUnderEveryStrategy) {
  std::filesystem::create_directories(scratch_.path("swap"));
  const auto trained = [&](const std::string& overrides) {
    const auto done = train(overrides + " model.dropout=0.1 train.gradient_accumulation=4 train.steps=2");
    EXPECT_EQ(done.code, 0) << done.output;
    const Json ran = summary();
    return ran["weights_hash"].get<std::string>() + " " + ran["loss"].dump();
  };
  const std::string plain = trained("strategy=zero0");
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3", "zero3 communicator.share_weights=false"})
    for (const std::string& tier : {std::string("cpu"), "nvme offload.nvme.path=" + scratch_.path("swap")})
      EXPECT_EQ(trained("strategy=" + strategy + " offload.activation_bytes=256B offload.activations=" + tier), plain)
          << strategy << " " << tier;
  EXPECT_EQ(trained("strategy=zero3 model.recompute=true offload.activation_bytes=256B offload.activations=cpu"),
            plain);
}

// Proves that no allocation bypasses the ledger: the kernel limits the address space of each rank. Bytes per parameter
// with four ranks: zero3 about 26, including the model that the program built; zero0 about 42.
TEST_F(MemoryTest, SLOW_Zero3TrainsWithinAnAddressSpaceLimitThatZero0Exceeds) {
  if (zr::test::kSanitized) GTEST_SKIP() << zr::test::kSanitizerMemory;
  const auto idle = shell("cd " + scratch_.folder().string() + " && " + kBin +
                          "gpt gpt.toml train.steps=1000000 job.name=idle > /dev/null & sleep 3; grep VmPeak "
                          "/proc/$!/status; kill $!");
  std::smatch found;
  ASSERT_TRUE(std::regex_search(idle.output, found, std::regex("VmPeak:\\s+(\\d+) kB"))) << idle.output;
  const int64_t parameters = 6 * (12 * 512 * 512 + 13 * 512) + 2 * 256 * 512,
                limit = std::stoll(found[1]) * 1024 + parameters * 34;
  const auto bounded = [&](const std::string& strategy) {
    return zeroth(
        "launch -n 4 -t 1 -- prlimit --as=" + std::to_string(limit) + " " + kBin +
        "gpt gpt.toml model.layers=6 model.width=512 model.heads=8 train.steps=2 train.micro_batch=1 strategy=" +
        strategy);
  };
  const auto sharded = bounded("zero3"), replicated = bounded("zero0"),
             copied = bounded("zero3 communicator.share_weights=false strategy.zero3.prefetch_bytes=1MiB");
  EXPECT_EQ(sharded.code, 0) << sharded.output;
  EXPECT_EQ(copied.code, 0) << copied.output;
  EXPECT_NE(replicated.code, 0) << replicated.output;
  EXPECT_TRUE(std::regex_search(replicated.output, std::regex("cannot map|no memory|can't allocate memory|bad_alloc")))
      << replicated.output;
}

// A configuration whose bytes are compared with the formulas, kind by kind.
struct Case {
  std::string strategy, dtype, reduce;
  int ranks;
  std::string name() const { return strategy + "-" + dtype + "-" + reduce; }
  double w() const { return dtype == "fp32" ? 4 : 2; }
};

class MemoryFormulasTest : public MemoryTest, public testing::WithParamInterface<int> {};

TEST_P(MemoryFormulasTest, PredictEveryKindWithinTwoPercent) {
  constexpr double kBucket = 512 << 10, kPrefetch = 1 << 20, kLayer = 448 * 448 + 448, P = 40 * kLayer;
  const int N = GetParam();
  std::vector<Case> cases;
  std::string list;
  for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
    for (const std::string dtype : {"fp32", "bf16", "fp16"})
      for (const std::string reduce : {"each_micro_step", "last_micro_step"}) {
        cases.push_back({strategy, dtype, reduce, N});
        list += "job.name=" + cases.back().name() + " strategy=" + strategy + " strategy." + strategy +
                ".bucket_bytes=512KiB train.dtype=" + dtype + " gradients.reduce=" + reduce +
                (strategy == "zero3" ? " strategy.zero3.prefetch_bytes=1MiB\n" : "\n");
      }
  const auto done = shell(
      "cd " + scratch_.folder().string() + " && TRAINS_LIST=" + scratch_.write("list", list) + " " + kBin +
      "zeroth launch -n " + std::to_string(N) + " -t 1 -- " + zr::test::rank_command("trains_list") +
      " " ZR_SOURCE_DIR
      "/tests/multirank/parity/parity.toml "
      "communicator.share_weights=false parity.model=ample train.gradient_accumulation=2 train.steps=1 job.threads=1");
  ASSERT_EQ(done.code, 0) << done.output;
  for (const Case& c : cases) {
    const Json device = summary(c.name())["memory"]["device"];
    const auto holds = [&](const char* kind) { return device.contains(kind) ? device[kind]["peak"].get<double>() : 0; };
    const std::string where = c.name() + " on " + std::to_string(N) + "\n" + device.dump(1);
    const auto expect = [&](const char* kind, double bytes) {
      EXPECT_NEAR(holds(kind), bytes, 0.02 * bytes) << kind << " " << where;
    };
    const bool sharded_weights = c.strategy == "zero3", replicated = c.strategy == "zero0",
               last = c.reduce == "last_micro_step";
    const double share = replicated ? 1 : 1.0 / N;
    expect("weights", c.w() * P * (sharded_weights ? share : 1));
    expect("optimizer", 8 * P * share);
    expect("master", c.w() < 4 ? 4 * P * share : 0);
    const bool flat = c.strategy == "zero1" && !last;  // unsharded gradients of one backward, plus the reduced shard
    expect("gradients", last ? 4 * P : 4 * P * share + (flat ? c.w() * P : 0));
    EXPECT_LE(holds("buckets"), last || flat ? 0 : 2 * kBucket) << where;
    EXPECT_GE(holds("buckets"), last || flat ? 0 : kBucket) << where;
    EXPECT_LE(holds("all_gather"), sharded_weights ? 40 * 448 * c.w() + kPrefetch + kLayer * c.w() + 64 : 0) << where;
    EXPECT_GE(holds("all_gather"), sharded_weights && N > 1 ? kPrefetch : 0) << where;
    expect("other", 4 * 448 * 448);  // the largest parameter, in transit at the start
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, MemoryFormulasTest, testing::Values(2), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, MemoryFormulasTest, testing::Values(1, 3, 4), zr::test::NameByRanks());

}  // namespace
