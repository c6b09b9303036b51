// examples/plugins/lion, built by g++ with the SDK's headers alone, beside the formula of its README.
#include <gtest/gtest.h>

#include <fstream>

#include "contract/optimizer_problem.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace zr::testing {
namespace {

const std::string kSource = ZR_SOURCE_DIR "/examples/plugins/lion/lion.cpp";

class LionTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<test::Scratch>();
    const Outcome built = shell(
        "g++ -std=c++17 -O2 -fPIC -shared -ffp-contract=off -fvisibility=hidden -Wall -Wextra "
        "-Werror -I" ZR_SOURCE_DIR "/sdk/include " +
        kSource + " -o " + folder_->folder().string() + "/zr_optimizer_lion.so");
    ASSERT_EQ(built.code, 0) << built.output;
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static std::string folder() { return folder_->folder().string(); }

 private:
  static std::unique_ptr<test::Scratch> folder_;
};
std::unique_ptr<test::Scratch> LionTest::folder_;

struct Constants {
  double beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
};

// One update in the order of the README, in type T: float gives the same bits, double a reference.
template <class T>
void reference(const Constants& c, const Problem& p, int64_t i, T& weight, T& momentum, T& direction) {
  const T grad = T(p.grad[i]) * T(p.grad_mul);
  direction = momentum * T(c.beta1) + grad * T(1 - c.beta1);
  weight = weight * T(1 - p.lr * c.weight_decay) - T((direction > 0) - (direction < 0)) * T(p.lr);
  momentum = momentum * T(c.beta2) + grad * T(1 - c.beta2);
}

TEST_F(LionTest, FollowsTheDocumentedOrderBitForBit) {
  for (const Constants& c : {Constants{}, Constants{0.95, 0.98, 0.1}}) {
    const OptimizerUnderTest lion(folder(), "lion",
                                  {{"beta1", c.beta1}, {"beta2", c.beta2}, {"weight_decay", c.weight_decay}});
    ASSERT_EQ(lion.describe().n_slots, 1u);
    Problem p(4099, 1);
    for (p.step = 1; p.step <= 5; ++p.step) {
      Problem expected = p;
      float direction = 0;
      for (int64_t i = 0; i < p.count; ++i)
        reference<float>(c, p, i, expected.weight[i], expected.slots[0][i], direction);
      p.run(lion, {{0, 1000}, {1000, 3099}});
      EXPECT_TRUE(p.same_bits(expected)) << "step " << p.step;
      p.new_gradient();
    }
  }
}

// Where the two terms of the direction nearly cancel, its sign in fp32 may differ from that in fp64.
TEST_F(LionTest, DiffersFromFp64ByAtMostTwoUlp) {
  const Constants c{0.9, 0.99, 0.1};
  const OptimizerUnderTest lion(folder(), "lion", {{"weight_decay", c.weight_decay}});
  Problem p(100003, 1);
  int64_t compared = 0;
  for (p.step = 1; p.step <= 4; ++p.step) {
    const Problem before = p;
    p.run(lion);
    for (int64_t i = 0; i < p.count; ++i) {
      double weight = before.weight[i], momentum = before.slots[0][i], direction = 0;
      const double size = std::fabs(momentum) * c.beta1 + std::fabs(before.grad[i]) * p.grad_mul * (1 - c.beta1);
      reference<double>(c, before, i, weight, momentum, direction);
      if (std::fabs(direction) < 1e-6 * size) continue;
      ++compared;
      const float scale = static_cast<float>(std::max({std::fabs(weight), std::fabs(double(before.weight[i])), p.lr}));
      ASSERT_LE(std::fabs(weight - p.weight[i]), 2.0 * (std::nextafter(scale, INFINITY) - scale)) << i;
      ASSERT_LE(std::fabs(momentum - p.slots[0][i]), 1e-6 * (std::fabs(before.slots[0][i]) + std::fabs(p.grad[i])));
    }
    p.new_gradient();
  }
  EXPECT_GT(compared, 4 * 100000);
}

TEST_F(LionTest, HasAtMost40Lines) {
  std::ifstream source(kSource);
  int lines = 0;
  for (std::string line; std::getline(source, line);) ++lines;
  EXPECT_GT(lines, 20);
  EXPECT_LE(lines, 40);
}

}  // namespace
}  // namespace zr::testing
