// Plug-ins and hosts that were built with different versions of the ABI headers train the same bits: every sized struct
// and every table of the later version is longer (grow.awk). The later host and the newer plug-ins run under
// AddressSanitizer, so that a side that reads or writes more than the other one has is an error.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "support/shell.hpp"

namespace zr::testing {
namespace {

const std::string kPrograms = ZR_BUILD_DIR "/tests/", kShipped = ZR_BUILD_DIR "/plugins",
                  kOlder = ZR_BUILD_DIR "/tests/plugins/evolution_older",
                  kNewer = ZR_BUILD_DIR "/tests/plugins/evolution_newer";

// What the job prints: the strategy, a hash of weights and states, the norm of the last gradient. `job`: a strategy and
// keys.
std::string trained(const std::string& program, const std::string& plugins, const std::string& job) {
  const Outcome outcome = shell("ZR_PROGRESS=off " + kPrograms + program + " " + plugins + " " + job);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  return outcome.output;
}

class EvolutionTest : public ::testing::TestWithParam<const char*> {};

TEST_P(EvolutionTest, LaterHostRunsOlderPlugins) {
  const std::string expected = trained("evolution_job", kShipped, GetParam());
  EXPECT_TRUE(std::regex_match(expected, std::regex("zero[13] [0-9a-f]{16} [0-9.]+\n"))) << expected;
  EXPECT_EQ(trained("evolution_job_later", kOlder, GetParam()), expected);
}

TEST_P(EvolutionTest, OlderHostRunsNewerPlugins) {
  EXPECT_EQ(trained("evolution_job_later", kNewer, GetParam()), trained("evolution_job", kShipped, GetParam()));
}

// Tiers that are mapped and that are not, memory that ranks share, and gradients that wait for the last micro-step, so
// that every slot of the tables is called.
INSTANTIATE_TEST_SUITE_P(SLOW_Jobs, EvolutionTest,
                         ::testing::Values("zero1", "zero3", "zero1 communicator.share_weights=true",
                                           "zero1 gradients.reduce=last_micro_step",
                                           "zero3 offload.optimizer=nvme offload.parameters=cpu",
                                           "zero3 offload.optimizer=cpu offload.parameters=nvme"),
                         [](const auto& info) {
                           return std::regex_replace(std::string(info.param), std::regex("[ .=]"), "_");
                         });

const std::string kServices = "zero1 optimizer=services optimizer.sgd.momentum=0";

TEST(EvolutionServicesTest, SLOW_AnOptimizerUsesEveryServiceOfALaterAndOfAnOlderHost) {
  const std::string expected = trained("evolution_job", kShipped, "zero1 optimizer.sgd.momentum=0");
  EXPECT_EQ(trained("evolution_job_later", kOlder, kServices), expected);
  EXPECT_EQ(trained("evolution_job_later", kNewer, kServices), expected);
}

// The other rank waits in a collective, and its communicator is aborted.
TEST(EvolutionAbortTest, SLOW_ARankThatFailsEndsTheJobOfAnotherVersion) {
  for (const std::string& plugins : {kOlder, kNewer}) {
    const Outcome outcome = shell(kPrograms + "evolution_job_later " + plugins + " zero1 fails");
    EXPECT_EQ(outcome.code, 1) << outcome.output;
    EXPECT_NE(outcome.output.find("rank 1: it fails on purpose\n"), std::string::npos) << outcome.output;
    EXPECT_NE(outcome.output.find("rank 0: "), std::string::npos) << outcome.output;
    EXPECT_EQ(outcome.output.find("AddressSanitizer"), std::string::npos) << outcome.output;
  }
}

// Every struct that begins with `size`, and its size in version 0.9, which later versions accept.
TEST(EvolutionHeadersTest, GrowEverySizedStruct) {
  std::set<std::string> sized, grown, frozen_sizes;
  const std::string headers = ZR_SOURCE_DIR "/sdk/include/zr/abi", later = ZR_EVOLUTION_DIR "/level_1/zr/abi";
  for (const auto& entry : std::filesystem::directory_iterator(headers)) {
    if (entry.path().extension() != ".h") continue;
    const auto text_of = [](const std::filesystem::path& file) {
      std::ifstream in(file);
      return std::string(std::istreambuf_iterator<char>(in), {});
    };
    const std::string now = text_of(entry.path()), next = text_of(later / entry.path().filename());
    const std::regex first_member(R"(struct (\w+) \{[^\n]*\n\s*uint32_t size[,;])"), size(R"((\w+)_size_0_9 = \d+)"),
        tail(R"(uint64_t grown_1\[2\];\n\} (\w+);)");
    for (std::sregex_iterator at(now.begin(), now.end(), first_member), end; at != end; ++at) sized.insert((*at)[1]);
    for (std::sregex_iterator at(now.begin(), now.end(), size), end; at != end; ++at) frozen_sizes.insert((*at)[1]);
    for (std::sregex_iterator at(next.begin(), next.end(), tail), end; at != end; ++at) grown.insert((*at)[1]);
  }
  EXPECT_GE(sized.size(), 30u);
  EXPECT_EQ(grown, sized);
  EXPECT_EQ(frozen_sizes, sized);
}

}  // namespace
}  // namespace zr::testing
