// Every strategy is bit-identical to plain libtorch. These tests run cases that cover every pair of choices; `make
// matrix` runs all combinations.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "multirank/parity/device.hpp"
#include "multirank/parity/matrix.hpp"
#include "multirank/parity/reference.hpp"
#include "multirank/parity/run_cases.hpp"
#include "support/name_by_ranks.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

using parity::Recipe;
using parity::test_case;
using parity::TestCase;
using parity::with;

class ParityTest : public testing::TestWithParam<int> {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void expect_exact(const std::vector<TestCase>& cases) const {
    const auto problems = parity::run_cases(cases, folder_);
    for (std::size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(problems[i], "") << cases[i].name();
  }
  const std::string folder_ =
      (std::filesystem::path(testing::TempDir()) / ("parity-" + std::to_string(::getpid()))).string();
};

const std::vector<std::string> kStrategies{"zero0",        "zero1",        "zero2",        "zero3",
                                           "zero1_shared", "zero2_shared", "zero3_shared", "round_robin"};

TEST_P(ParityTest, HoldsForEveryPairOfChoices) {
  std::vector<TestCase> cases;
  for (TestCase& c : parity::cover())
    if (c.ranks == GetParam()) cases.push_back(std::move(c));
  EXPECT_GT(cases.size(), 5u);
  expect_exact(cases);
}
INSTANTIATE_TEST_SUITE_P(Ranks, ParityTest, testing::Values(2, 4), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, ParityTest, testing::Values(1, 3), zr::test::NameByRanks());

// On the simulated accelerator of tests/simulators/sim_device, whose streams delay the start of operators at random.
// The reference is plain libtorch on the same device.
class DeviceParityTest : public ParityTest {
 protected:
  static void SetUpTestSuite() {
    ::setenv("ZR_PARITY_DEVICE", "sim", 1);
    ::setenv("ZR_PARITY_LIBRARY", ZR_BUILD_DIR "/tests/devices/libzr_sim_device.so", 1);
    ::setenv("ZR_SIM_DELAY_US", "50", 1);
    ::setenv("ZR_SIM_SEED", std::to_string(7 + ::getpid() % 1000).c_str(), 0);  // printed if the test fails
    parity::choose_device();
  }
  void check_device_cases() const {
    SCOPED_TRACE(std::string("ZR_SIM_SEED=") + std::getenv("ZR_SIM_SEED"));
    std::vector<TestCase> cases;  // the device has no sparse tensors
    for (TestCase& c : parity::cover())
      if (c.ranks == GetParam() && c.recipe.model != "embeddings") cases.push_back(std::move(c));
    EXPECT_GT(cases.size(), 5u);
    expect_exact(cases);
  }
};

TEST_P(DeviceParityTest, HoldsForEveryPairOfChoices) { check_device_cases(); }
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceParityTest, testing::Values(2), zr::test::NameByRanks());
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, DeviceParityTest, testing::Values(1, 3, 4), zr::test::NameByRanks());

// The device computes the operators of these models by the same operators of the CPU: one reference, on the device,
// holds for the ranks on both.
TEST_F(DeviceParityTest, UsualArchitecturesHaveTheBitsOfTheCpu) {
  SCOPED_TRACE(std::string("ZR_SIM_SEED=") + std::getenv("ZR_SIM_SEED"));
  std::vector<TestCase> cases;
  for (const std::string model : {"gpt", "convolutional", "recurrent"})
    for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
      for (const std::string dtype : {"fp32", "bf16"})
        cases.push_back(with(test_case({strategy, dtype, "n2"}), model, "parity.model=" + model,
                             [model](Recipe& r) { r.model = model; }));
  expect_exact(cases);
  ::unsetenv("ZR_PARITY_DEVICE");  // of the ranks; the reference keeps the device
  expect_exact(cases);
}

// The CPU updates the states, while weights and gradients stay in memory of the device.
TEST_F(DeviceParityTest, HoldsWithStatesOnTheCpu) {
  SCOPED_TRACE(std::string("ZR_SIM_SEED=") + std::getenv("ZR_SIM_SEED"));
  const auto gpt = [](const std::string& strategy, const std::string& dtype) {
    return with(test_case({strategy, dtype, "cpu_states", "n2"}), "gpt", "parity.model=gpt",
                [](Recipe& r) { r.model = "gpt"; });
  };
  std::vector<TestCase> cases;
  for (const std::string strategy : {"zero1", "zero2", "zero3"}) {
    for (const std::string dtype : {"fp32", "bf16", "fp16"})
      cases.push_back(test_case({strategy, dtype, "cpu_states", "everything", "n2"}));
    cases.push_back(test_case({strategy, "bf16", "a4", "cpu_states", "everything", "n2"}));
    cases.push_back(gpt(strategy, "fp16"));
  }
  cases.push_back(gpt("zero2", "bf16"));
  for (const std::string dtype : {"fp32", "bf16"})
    cases.push_back(test_case({"zero2", dtype, "cpu_states", "everything", "n1"}));
  expect_exact(cases);
}

// Every tensor that autograd saves on the device goes to a tier and back.
TEST_F(DeviceParityTest, HoldsWithOffloadedActivations) {
  SCOPED_TRACE(std::string("ZR_SIM_SEED=") + std::getenv("ZR_SIM_SEED"));
  std::filesystem::create_directories(folder_ + "/swap");
  const std::string least = " offload.activation_bytes=1B";
  std::vector<TestCase> cases;
  for (const auto& [strategy, dtype] : {std::pair("zero1", "fp32"), {"zero3", "bf16"}})
    for (const std::string model : {"everything", "recomputed"}) {
      const TestCase one = test_case({strategy, dtype, model, "n2", "a4"});
      cases.push_back(with(one, "cpu", "offload.activations=cpu" + least));
      cases.push_back(with(one, "nvme", "offload.activations=nvme offload.nvme.path=" + folder_ + "/swap" + least));
    }
  expect_exact(cases);
}

// On hosts that the ranks pretend to be on, connected by MPI: ranks 0 and 1 of three share one, two and two of four.
class HostsParityTest : public ParityTest {
 public:
  static void SetUpTestSuite() { ::setenv("ZR_PARITY_HOSTS", "2", 1); }
  static void TearDownTestSuite() { ::unsetenv("ZR_PARITY_HOSTS"); }
};

TEST_P(HostsParityTest, HoldsForEveryPairOfChoices) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "built without MPI";
  std::vector<TestCase> cases;
  for (TestCase& c : parity::cover())
    if (c.ranks == GetParam()) cases.push_back(std::move(c));
  EXPECT_GT(cases.size(), 5u);
  expect_exact(cases);
}
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, HostsParityTest, testing::Values(2, 3, 4), zr::test::NameByRanks());

// Memory of the simulated accelerator passes between such hosts through host memory.
class DeviceHostsParityTest : public DeviceParityTest {
 protected:
  static void SetUpTestSuite() {
    DeviceParityTest::SetUpTestSuite();
    HostsParityTest::SetUpTestSuite();
  }
  static void TearDownTestSuite() { HostsParityTest::TearDownTestSuite(); }
};

TEST_P(DeviceHostsParityTest, HoldsForEveryPairOfChoices) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/tests/plugins/sim/zr_communicator_mpi.so"))
    GTEST_SKIP() << "built without MPI";
  check_device_cases();
}
INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, DeviceHostsParityTest, testing::Values(2, 3, 4), zr::test::NameByRanks());

TEST_F(ParityTest, HoldsWithTwoThreadsPerRank) {
  std::vector<TestCase> cases;
  for (const std::string& strategy : kStrategies)
    for (const std::string dtype : {"fp32", "bf16"})
      cases.push_back(with(test_case({strategy, dtype, "everything", "n2", "a4"}), "two-threads", "job.threads=2",
                           [](Recipe& r) { r.threads = 2; }));
  expect_exact(cases);
}

// Ranks that use different parameters cannot gather them together, so zero3 is excluded.
TEST_F(ParityTest, HoldsWhenRanksUseDifferentParameters) {
  std::vector<TestCase> cases;
  for (const std::string& strategy : kStrategies)
    for (const std::string accumulation : {"a1", "a4"})
      if (strategy != "zero3")
        cases.push_back(with(test_case({strategy, accumulation, "everything", "n3"}), "divergent",
                             "parity.model=divergent", [](Recipe& r) { r.model = "divergent"; }));
  expect_exact(cases);
}

// Every tensor that autograd saves goes to a tier and back, even the smallest.
TEST_F(ParityTest, SLOW_HoldsWithOffloadedActivations) {
  std::filesystem::create_directories(folder_ + "/swap");
  const std::string nvme = "offload.activations=nvme offload.nvme.path=" + folder_ + "/swap",
                    least = " offload.activation_bytes=1B";
  std::vector<TestCase> cases;
  for (const std::string model : {"with_dropout", "recomputed", "lstm", "torchscript", "everything"})
    for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3", "zero3_shared"}) {
      const TestCase one = test_case({strategy, model, "n2", "a4"});
      cases.push_back(with(one, "cpu", "offload.activations=cpu" + least));
      cases.push_back(with(one, "nvme", nvme + least));
    }
  for (const std::string dtype : {"bf16", "fp16"})
    cases.push_back(with(test_case({"zero2", dtype, "everything", "n2", "last"}), "nvme", nvme + least));
  expect_exact(cases);
}

TEST_F(ParityTest, DependsOnRanksTimesAccumulationAlone) {
  std::vector<TestCase> cases;
  for (const std::string& strategy : kStrategies)
    for (const int ranks : {4, 2, 1})
      cases.push_back(with(test_case({strategy, "with_dropout", "n" + std::to_string(ranks)}), "four",
                           "train.gradient_accumulation=" + std::to_string(4 / ranks),
                           [](Recipe& r) { r.micro_batches = 4; }));
  expect_exact(cases);
}

TEST(ParityReferenceTest, AddsInTheRequestedOrder) {
  // With fp32 and three micro-batches another order gives different bits, so a test case can fail.
  Recipe recipe = test_case({"everything", "sgd", "n3"}).recipe;
  const parity::Outcome straight = parity::reference(recipe);
  recipe.backwards = true;
  EXPECT_NE(difference(straight, parity::reference(recipe)), "");
  recipe = test_case({"everything", "sgd", "n2", "a4"}).recipe;
  const parity::Outcome each = parity::reference(recipe);
  recipe.last = true;
  EXPECT_NE(difference(each, parity::reference(recipe)), "");
}

TEST(ParityDifferenceTest, NamesStepParameterAndElement) {
  parity::Outcome one{{1, 2, 1, {{"w", {0, 1, 2}}}}, {1, 2, 1, {{"w", {0, 1, 2}}}}}, other = one;
  EXPECT_EQ(difference(one, other), "");
  other[1].weights["w"][1] = 1.5;
  other[1].loss = 3;
  EXPECT_EQ(difference(one, other), "step 2: w[1] 1, not 1.5, loss 1, not 3");
  EXPECT_EQ(parity::difference({}, {}), "0 steps, not 0");
}

TEST(ParityMatrixTest, ContainsEveryCombination) {
  std::size_t cases = 1;
  for (const parity::Axis& axis : parity::axes()) {
    std::size_t choices = 0;
    for (const parity::Choice& choice : axis.choices) choices += choice.in_full;
    // Strategy and ranks: all combinations except shared weights on a single rank.
    cases *= axis.name == "strategy" ? choices * 4 - 3 : axis.name == "ranks" ? 1 : choices;
  }
  EXPECT_EQ(parity::full().size(), cases);
}

// A GPU computed 975 cases in 64 s and 300 in 32 s: at the lower rate, 1950 cases take 208 s of the 530 s of a part.
TEST(ParityMatrixTest, PartsOfTheGpuTestsCoverAllCasesInTime) {
  const std::vector<TestCase> cases = parity::full();
  std::vector<bool> covered(cases.size());
  std::ifstream parts(ZR_SOURCE_DIR "/tests/gpu/parts");
  int lines = 0;
  for (std::string line; std::getline(parts, line);) {
    if (!line.starts_with("parity ")) continue;
    const std::string word = line.substr(7);
    if (word == "-cpu_states-") {
      EXPECT_GT(std::ranges::count_if(parity::cover(), [&](const TestCase& c) { return c.matches(word); }), 10);
      continue;
    }
    ++lines;
    EXPECT_EQ(word.find(' '), std::string::npos) << line;
    int count = 0;
    for (std::size_t i = 0; i < cases.size(); ++i)
      if (cases[i].matches(word)) {
        ++count;
        covered[i] = true;
      }
    EXPECT_EQ(count, lines == 1 ? 546 : 1950) << line;
  }
  EXPECT_EQ(lines, 13);
  EXPECT_EQ(std::count(covered.begin(), covered.end(), true), 23400);
  EXPECT_EQ(cases.size(), 23400u);
}

// Output that is cut off says which cases ran: what starts the ranks of the second group sees the result of the first.
TEST(ParityMatrixTest, PrintsEachGroupOfCasesWhenItIsComplete) {
  if (!std::filesystem::exists(ZR_BUILD_DIR "/plugins/zr_communicator_mpi.so")) GTEST_SKIP() << "built without MPI";
  const zr::test::Scratch scratch;
  const std::string mpirun =
      scratch.write("path/mpirun.openmpi", "#!/bin/sh\ncp " + scratch.path("out") + " " + scratch.path("seen") +
                                               "\necho no ranks today\nexit 1\n");
  std::filesystem::permissions(mpirun, std::filesystem::perms::owner_all);
  const auto done = zr::testing::shell(
      "cd " + scratch.folder().string() + " && PATH=$PWD/path:$PATH ZR_PARITY_HOSTS=1 env -u ZR_PARITY_DEVICE " +
      ZR_BUILD_DIR "/tests/parity_matrix 'tied-fp32-sgd-each-a1-zero2-none-n[12]' > out; echo $?");
  EXPECT_EQ(done.output, "1\n");
  const std::string first = "n1: cases 1 to 1 of 1: 1 exact, 0 different, ";
  const auto text_of = [&](const char* name) {
    std::ifstream in(scratch.path(name));
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_EQ(text_of("seen").compare(0, first.size(), first), 0) << text_of("seen");
  const std::string all = text_of("out");
  for (const char* const text :
       {"s; tied-fp32-sgd-each-a1-zero2-none-n1-clipped-fp32_gradients to tied-fp32-",
        "tied-fp32-sgd-each-a1-zero2-none-n2-clipped-fp32_gradients: the ranks failed: no ranks today",
        "n2: cases 1 to 1 of 1: 0 exact, 1 different, ", "\n2 cases, 1 exact, 1 different, "})
    EXPECT_NE(all.find(text), std::string::npos) << text << " is not in\n" << all;
}

}  // namespace
