// Optimizers whose update or states are not elementwise: the shipped libraries, stepped as the host does, beside their
// formulas in fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "contract/tensor_problem.hpp"

namespace zr::testing {
namespace {

const std::string kPlugins = ZR_BUILD_DIR "/plugins";

// The root mean square of the differences, relative to that of the update.
double relative_error(const std::vector<double>& expected, const std::vector<float>& before, const Tensor& after) {
  double error = 0, update = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(after.weight[i] - expected[i], 2);
    update += std::pow(expected[i] - before[i], 2);
  }
  return std::sqrt(error / update);
}

const std::vector<std::vector<int64_t>> kShapes{{1},       {1000},     {1024},     {5000},      {3, 3},     {7, 1},
                                                {1, 9000}, {300, 100}, {2000, 36}, {16, 3, 64}, {64, 1000}, {577, 36}};

class TensorOptimizersTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, TensorOptimizersTest, ::testing::Values("lamb", "adafactor", "adamw8bit"),
                         [](const auto& info) { return info.param; });

TEST_P(TensorOptimizersTest, GiveTheSameBitsForAnySlicing) {
  const OptimizerUnderTest optimizer(kPlugins, GetParam(), {{"min_8bit_elements", 0}});
  for (const auto& shape : kShapes)
    for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
      Tensor complete(optimizer, shape, dtype), cut = complete;
      for (int steps = 0; steps < 3; ++steps) {
        complete.run(optimizer);
        cut.run(optimizer, 1);
        EXPECT_TRUE(cut.same_bits(complete)) << ::testing::PrintToString(shape) << " dtype " << dtype;
        complete.new_gradient();
        cut.new_gradient();
      }
    }
}

TEST_P(TensorOptimizersTest, GiveTheSameBitsUnderEveryInstructionSet) {
  for (const auto& shape : kShapes)
    for (const zr_dtype dtype : {ZR_F32, ZR_BF16}) {
      std::vector<Tensor> results;
      for (const char* isa : {"portable", "avx2", "avx512"}) {
        setenv("ZR_ISA", isa, 1);
        const OptimizerUnderTest limited(kPlugins, GetParam(), {{"min_8bit_elements", 0}});
        unsetenv("ZR_ISA");
        results.emplace_back(limited, shape, dtype);
        for (int steps = 0; steps < 2; ++steps) {
          results.back().run(limited);
          results.back().new_gradient();
        }
        EXPECT_TRUE(results.back().same_bits(results.front())) << isa << " " << ::testing::PrintToString(shape);
      }
    }
}

TEST_P(TensorOptimizersTest, RoundTheMasterTo16BitWeightsOnce) {
  const OptimizerUnderTest optimizer(kPlugins, GetParam(), {{"min_8bit_elements", 0}});
  for (const auto& shape : kShapes)
    for (const zr_dtype dtype : {ZR_BF16, ZR_F16}) {
      Tensor wide(optimizer, shape), narrow(optimizer, shape, dtype);
      wide.run(optimizer);
      narrow.run(optimizer);
      ASSERT_EQ(narrow.weight, wide.weight) << ::testing::PrintToString(shape);
      for (std::size_t i = 0; i < wide.weight.size(); ++i)
        ASSERT_EQ(narrow.out[i], dtype == ZR_BF16 ? to_bf16(wide.weight[i]) : to_f16(wide.weight[i])) << i;
    }
}

struct LambReference {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0.01, least = 0.01, most = 10;
  bool adapt = true;
  // The weights after a step from the state of `t`.
  std::vector<double> step(const Tensor& t) const {
    std::vector<double> direction(t.weight.size()), result(t.weight.begin(), t.weight.end());
    double weights = 0, directions = 0;
    for (std::size_t i = 0; i < result.size(); ++i) {
      const double g = static_cast<double>(t.grad[i]) * t.mul, m = t.state(0)[i] * beta1 + g * (1 - beta1),
                   v = t.state(1)[i] * beta2 + g * g * (1 - beta2), n = static_cast<double>(t.step);
      direction[i] =
          m / (1 - std::pow(beta1, n)) / (std::sqrt(v / (1 - std::pow(beta2, n))) + eps) + weight_decay * t.weight[i];
      weights += result[i] * result[i];
      directions += direction[i] * direction[i];
    }
    const double ratio = adapt ? std::clamp(std::sqrt(weights / directions), least, most) : 1;
    for (std::size_t i = 0; i < result.size(); ++i) result[i] -= t.lr * ratio * direction[i];
    return result;
  }
};

TEST(LambTest, FollowsItsFormulaInFp64) {
  for (const bool adapt : {true, false}) {
    LambReference reference;
    reference.weight_decay = 0.1;
    reference.most = 3;
    reference.adapt = adapt;
    const OptimizerUnderTest lamb(kPlugins, "lamb",
                                  {{"weight_decay", 0.1}, {"max_trust_ratio", 3}, {"adapt", adapt ? 1 : 0}});
    for (const auto& shape : kShapes) {
      Tensor t(lamb, shape);
      for (int steps = 0; steps < 5; ++steps) {
        const std::vector<double> expected = reference.step(t);
        const std::vector<float> before = t.weight;
        t.run(lamb);
        EXPECT_LT(relative_error(expected, before, t), 1e-4) << ::testing::PrintToString(shape) << " step " << t.step;
        t.new_gradient();
      }
    }
  }
}

TEST(LambTest, LeavesWeightsOfNormZeroToAdam) {
  const OptimizerUnderTest lamb(kPlugins, "lamb"), adam(kPlugins, "lamb", {{"adapt", 0}});
  Tensor scaled(lamb, {40, 50}), plain(adam, {40, 50});
  std::fill(scaled.weight.begin(), scaled.weight.end(), 0.F);
  plain.weight = scaled.weight;
  scaled.run(lamb);
  plain.run(adam);
  EXPECT_TRUE(scaled.same_bits(plain));
}

struct AdafactorReference {
  double beta2_decay = -0.8, eps1 = 1.1920928955078125e-07, eps2 = 1e-3, clip = 1, weight_decay = 0;
  std::vector<double> step(const Tensor& t) const {
    const std::size_t n = t.weight.size(), columns = t.shape.size() == 2 ? static_cast<std::size_t>(t.shape[1]) : 0;
    const double gain = std::pow(static_cast<double>(t.step), beta2_decay);
    std::vector<double> estimate(n), result(t.weight.begin(), t.weight.end());
    const auto g = [&](std::size_t i) { return static_cast<double>(t.grad[i]) * t.mul; };
    if (columns == 0) {
      for (std::size_t i = 0; i < n; ++i) estimate[i] = (1 - gain) * t.state(0)[i] + gain * g(i) * g(i);
    } else {
      const std::size_t rows = n / columns;
      std::vector<double> row(rows), col(columns);
      for (std::size_t i = 0; i < n; ++i) {
        row[i / columns] += g(i) * g(i) / static_cast<double>(columns);
        col[i % columns] += g(i) * g(i) / static_cast<double>(rows);
      }
      double mean = 0;
      for (std::size_t r = 0; r < rows; ++r) {
        row[r] = (1 - gain) * t.state(0)[r] + gain * row[r];
        mean += row[r] / static_cast<double>(rows);
      }
      for (std::size_t c = 0; c < columns; ++c) col[c] = (1 - gain) * t.state(1)[c] + gain * col[c];
      for (std::size_t i = 0; i < n; ++i) estimate[i] = row[i / columns] * col[i % columns] / std::max(mean, eps1);
    }
    double weights = 0, updates = 0;
    for (std::size_t i = 0; i < n; ++i) {
      estimate[i] = g(i) / std::sqrt(std::max(estimate[i], eps1 * eps1));
      updates += estimate[i] * estimate[i] / static_cast<double>(n);
      weights += result[i] * result[i] / static_cast<double>(n);
    }
    const double rate = std::min(t.lr, 1 / std::sqrt(static_cast<double>(t.step))) *
                        std::max(eps2, std::sqrt(weights)) / std::max(1.0, std::sqrt(updates) / clip);
    for (std::size_t i = 0; i < n; ++i) result[i] = result[i] * (1 - t.lr * weight_decay) - rate * estimate[i];
    return result;
  }
};

TEST(AdafactorTest, FollowsItsFormulaInFp64) {
  AdafactorReference reference;
  reference.weight_decay = 0.1;
  reference.clip = 0.8;
  const OptimizerUnderTest adafactor(kPlugins, "adafactor", {{"weight_decay", 0.1}, {"clip_threshold", 0.8}});
  for (const auto& shape : kShapes) {
    Tensor t(adafactor, shape);
    for (int steps = 0; steps < 5; ++steps) {
      const std::vector<double> expected = reference.step(t);
      const std::vector<float> before = t.weight;
      t.run(adafactor, 1);
      EXPECT_LT(relative_error(expected, before, t), 1e-4) << ::testing::PrintToString(shape) << " step " << t.step;
      t.new_gradient();
    }
  }
}

TEST(AdafactorTest, ForgetsOldGradientsIfTheMeansHaveNoMemory) {
  AdafactorReference reference;
  reference.beta2_decay = 0;
  const OptimizerUnderTest adafactor(kPlugins, "adafactor", {{"beta2_decay", 0}});
  for (const auto& shape : kShapes) {
    Tensor t(adafactor, shape);
    t.run(adafactor);
    t.new_gradient();
    for (float& g : t.grad) g *= 1e-3F;
    const std::vector<double> expected = reference.step(t);
    const std::vector<float> before = t.weight;
    t.run(adafactor, 1);
    EXPECT_LT(relative_error(expected, before, t), 1e-4) << ::testing::PrintToString(shape);
  }
}

TEST(AdafactorTest, HasOneStatePerRowAndOnePerColumn) {
  const OptimizerUnderTest adafactor(kPlugins, "adafactor");
  Tensor matrix(adafactor, {2000, 36});
  ASSERT_EQ(matrix.slots.size(), 2u);
  EXPECT_EQ(matrix.states[0].size(), 2000u * 4) << "one per row";
  EXPECT_EQ(matrix.block, 9216) << "the least common multiple of 36 and 1024: 256 rows";
  EXPECT_EQ(matrix.states[1].size(), 8u * 36 * 4) << "one per column, a copy for each of 8 blocks";
  matrix.run(adafactor, 2);
  for (int copy = 1; copy < 8; ++copy)
    EXPECT_EQ(std::memcmp(matrix.state(1), matrix.state(1) + copy * 36, 36 * 4), 0) << "copy " << copy;
  EXPECT_EQ(Tensor(adafactor, {16, 3, 64}).slots.size(), 1u) << "other tensors have a full state";
}

// The states after one update are the codes of the moments of AdamW; each differs from its moment by at most half a
// cell of its decade, relative to the largest of 256 elements (docs/optimizers.md).
TEST(AdamW8BitTest, StatesDifferFromTheMomentsByAtMostHalfACell) {
  const OptimizerUnderTest optimizer(kPlugins, "adamw8bit");
  Tensor t(optimizer, {100, 257});
  ASSERT_EQ(t.slots.size(), 4u);
  EXPECT_EQ(t.states[0].size() + t.states[1].size(), 2u * 25700) << "two bytes per element";
  t.run(optimizer);
  for (const int which : {0, 1}) {
    const float* scales = t.state(static_cast<std::size_t>(which) + 2);
    for (int64_t i = 0; i < t.count; ++i) {
      const double g = static_cast<double>(t.grad[static_cast<std::size_t>(i)]) * t.mul,
                   moment = which == 0 ? g * 0.1 : g * g * 0.001, scale = scales[i / 256];
      const auto code = static_cast<uint8_t>(t.states[static_cast<std::size_t>(which)][static_cast<std::size_t>(i)]);
      const int n = which == 0 ? 1 : 2, offset = n - 1, top = which == 0 ? 128 : 255;
      const int magnitude = which == 0 && code > 128 ? code & 127 : code;
      double value = 0, cells = n, bound = 1e-6;
      if (magnitude == top) {
        value = 1;
      } else if (magnitude > 0) {
        while (magnitude >= 2 * cells - offset) {
          cells *= 2;
          bound *= 10;
        }
        value = bound * (0.1 + 0.9 * (magnitude - (cells - offset) + 0.5) / cells);
      }
      if (which == 0 && code > 128) value = -value;
      const double size = std::fabs(moment / scale);
      double allowed = 1e-7, decade = 1e-6;
      for (int cell = n; decade < 1.5; decade *= 10, cell *= 2)
        if (size > decade / 10 * (1 - 1e-5)) allowed = 0.45 * decade / cell * 1.001;
      if (which == 1 && size < 1e-7) allowed = 3.251e-7;  // the first midpoint
      ASSERT_LE(std::fabs(value - moment / scale), std::max(allowed, 1.001e-7)) << which << " element " << i;
    }
  }
}

// One element of a block has a large gradient, so that those of the others are tiny beside the scales. All elements
// then have gradients of 0: an update is at most as large as that of AdamW, and has its sign.
TEST(AdamW8BitTest, UpdatesElementsWithTinyGradientsAtMostAsAdamWDoes) {
  const OptimizerUnderTest optimizer(kPlugins, "adamw8bit", {{"min_8bit_elements", 0}}), adamw(kPlugins, "adamw");
  Tensor t(optimizer, {300}), reference(adamw, {300});
  for (std::size_t i = 0; i < 300; ++i) {
    const auto size = static_cast<float>(std::pow(10.0, -static_cast<double>(i % 12)));
    t.grad[i] = reference.grad[i] = i % 256 == 0 ? 1.F : i % 2 == 0 ? size : -size;
    t.weight[i] = reference.weight[i] = 0;
  }
  for (int step = 0; step < 20; ++step) {
    t.run(optimizer);
    reference.run(adamw);
    for (std::size_t i = 0; i < 300; ++i) {
      const float ours = t.weight[i], exact = reference.weight[i];
      ASSERT_LE(std::fabs(ours), std::fabs(exact) * 1.5F) << "step " << step << " element " << i << " adamw " << exact;
      ASSERT_GE(ours * exact, 0) << "step " << step << " element " << i;
      t.grad[i] = reference.grad[i] = 0;
    }
  }
}

TEST(AdamW8BitTest, HasFp32StatesForSmallParameters) {
  const OptimizerUnderTest optimizer(kPlugins, "adamw8bit"), adamw(kPlugins, "adamw");
  Tensor small(optimizer, {4095}), reference(adamw, {4095});
  for (int steps = 0; steps < 3; ++steps) {
    small.run(optimizer);
    reference.run(adamw);
    EXPECT_TRUE(small.same_bits(reference));
    small.new_gradient();
    reference.new_gradient();
  }
  EXPECT_EQ(Tensor(optimizer, {4096}).slots.size(), 4u);
}

TEST(AdamW8BitTest, KeepsBlocksOfTinyGradientsFinite) {
  const OptimizerUnderTest optimizer(kPlugins, "adamw8bit", {{"min_8bit_elements", 0}});
  Tensor t(optimizer, {512});
  for (std::size_t i = 0; i < t.grad.size(); ++i) t.grad[i] = i < 256 ? 0.F : 1e-38F;
  for (int steps = 0; steps < 3; ++steps) t.run(optimizer);
  for (const float w : t.weight) EXPECT_TRUE(std::isfinite(w));
}

// A gradient whose square is infinite in fp32 stops its own updates, as with adamw, and makes no other weight NaN.
TEST(AdamW8BitTest, KeepsWeightsFiniteIfASquareOverflows) {
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    setenv("ZR_ISA", isa, 1);
    const OptimizerUnderTest optimizer(kPlugins, "adamw8bit", {{"min_8bit_elements", 0}});
    unsetenv("ZR_ISA");
    Tensor t(optimizer, {600});
    t.grad[5] = 1e25F;
    t.grad[300] = -1e25F;
    for (int steps = 0; steps < 3; ++steps) {
      t.run(optimizer);
      for (std::size_t i = 0; i < t.weight.size(); ++i) ASSERT_TRUE(std::isfinite(t.weight[i])) << isa << " " << i;
      for (const std::size_t i : {5, 300}) EXPECT_EQ(static_cast<uint8_t>(t.states[1][i]), 255) << isa << " " << i;
      t.new_gradient();
    }
  }
}

// The ratio of an infinite moment to its infinite scale is NaN, whose code is that of 1.
TEST(AdamW8BitTest, StoresInfinityWithTheSameCodeUnderEveryInstructionSet) {
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    setenv("ZR_ISA", isa, 1);
    const OptimizerUnderTest optimizer(kPlugins, "adamw8bit", {{"min_8bit_elements", 0}});
    unsetenv("ZR_ISA");
    Tensor t(optimizer, {300});
    t.grad[5] = t.grad[295] = std::numeric_limits<float>::infinity();
    t.grad[40] = -t.grad[5];
    t.run(optimizer);
    for (const std::size_t i : {5, 40, 295}) {
      EXPECT_EQ(static_cast<uint8_t>(t.states[0][i]), 128) << isa << " " << i;
      EXPECT_EQ(static_cast<uint8_t>(t.states[1][i]), 255) << isa << " " << i;
    }
  }
}

struct MuonReference {
  double momentum = 0.95, weight_decay = 0.1, eps = 1e-7;
  bool nesterov = true, match_rms_adamw = false, bf16 = false;
  using Matrix = std::vector<double>;

  double rounded(double value) const { return bf16 ? from_bf16(to_bf16(static_cast<float>(value))) : value; }

  static Matrix product(const Matrix& a, const Matrix& b, int64_t m, int64_t k, int64_t n) {
    Matrix c(static_cast<std::size_t>(m * n), 0);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t l = 0; l < k; ++l)
        for (int64_t j = 0; j < n; ++j)
          c[static_cast<std::size_t>(i * n + j)] +=
              a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(l * n + j)];
    return c;
  }
  static Matrix transposed(const Matrix& a, int64_t m, int64_t n) {
    Matrix t(a.size());
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) t[static_cast<std::size_t>(j * m + i)] = a[static_cast<std::size_t>(i * n + j)];
    return t;
  }
  // `x`: m x n with m <= n.
  Matrix orthogonalized(Matrix x, int64_t m, int64_t n) const {
    double squares = 0;
    for (double& v : x) {
      v = rounded(v);
      squares += v * v;
    }
    const double norm = rounded(std::max(std::sqrt(squares), eps));
    for (double& v : x) v = rounded(v / norm);
    for (int i = 0; i < 5; ++i) {
      Matrix gram = product(x, transposed(x, m, n), m, n, m);
      for (double& v : gram) v = rounded(v);
      const Matrix square = product(gram, gram, m, m, m);
      Matrix polynomial(gram.size());
      for (std::size_t j = 0; j < gram.size(); ++j) polynomial[j] = rounded(-4.7750 * gram[j] + 2.0315 * square[j]);
      const Matrix applied = product(polynomial, x, m, m, n);
      for (std::size_t j = 0; j < x.size(); ++j) x[j] = rounded(3.4445 * x[j] + applied[j]);
    }
    return x;
  }
  std::vector<double> step(const Tensor& t) const {
    const int64_t m = t.shape[0], n = t.shape[1];
    Matrix x(t.weight.size()), result(t.weight.begin(), t.weight.end());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double g = static_cast<double>(t.grad[i]) * t.mul, b = t.state(0)[i] * momentum + g * (1 - momentum);
      x[i] = nesterov ? g * (1 - momentum) + b * momentum : b;
    }
    x = m > n ? transposed(orthogonalized(transposed(x, m, n), n, m), n, m) : orthogonalized(x, m, n);
    const double factor = match_rms_adamw ? 0.2 * std::sqrt(static_cast<double>(std::max(m, n)))
                                          : std::sqrt(std::max(1.0, static_cast<double>(m) / static_cast<double>(n)));
    for (std::size_t i = 0; i < x.size(); ++i) result[i] = result[i] * (1 - t.lr * weight_decay) - t.lr * factor * x[i];
    return result;
  }
};

const std::vector<std::vector<int64_t>> kMatrices{{1, 1}, {3, 5}, {16, 64}, {64, 16}, {100, 37}, {128, 128}, {1, 300}};

TEST(MuonTest, FollowsItsFormulaInFp64) {
  for (const bool other : {false, true}) {
    MuonReference reference;
    reference.nesterov = !other;
    reference.match_rms_adamw = other;
    const OptimizerUnderTest muon(kPlugins, "muon", {{"nesterov", other ? 0 : 1}},
                                  {{"adjust_lr", other ? "match_rms_adamw" : "original"}});
    for (const auto& shape : kMatrices) {
      Tensor t(muon, shape);
      t.lr = 1;  // the update is as large as the weights: fp32 weights do not hide its error
      for (int steps = 0; steps < 3; ++steps) {
        const std::vector<double> expected = reference.step(t);
        const std::vector<float> before = t.weight;
        t.run(muon);
        EXPECT_LT(relative_error(expected, before, t), 1e-5) << ::testing::PrintToString(shape) << " step " << t.step;
        t.new_gradient();
      }
    }
  }
}

// Only the order of sums differs from the reference: a sum near the middle of two bf16 values may be rounded to the
// other.
TEST(MuonTest, RoundsToBf16WhereItsFormulaSays) {
  const OptimizerUnderTest muon(kPlugins, "muon", {}, {{"precision", "bf16"}});
  MuonReference in_bf16;
  in_bf16.bf16 = true;
  for (const auto& shape : kMatrices) {
    Tensor t(muon, shape);
    t.lr = 1;
    for (int steps = 0; steps < 3; ++steps) {
      const std::vector<double> expected = in_bf16.step(t), in_fp64 = MuonReference().step(t);
      const std::vector<float> before = t.weight;
      t.run(muon);
      EXPECT_LT(relative_error(expected, before, t), shape[0] < 100 ? 5e-3 : 1e-2)
          << ::testing::PrintToString(shape) << " step " << t.step;
      EXPECT_LT(relative_error(in_fp64, before, t), 5e-2) << ::testing::PrintToString(shape) << " step " << t.step;
      t.new_gradient();
    }
  }
}

TEST(MuonTest, SingularValuesOfTheUpdateAreNearOne) {
  const OptimizerUnderTest muon(kPlugins, "muon", {{"weight_decay", 0}});
  Tensor t(muon, {24, 60});
  t.lr = 1;
  std::fill(t.weight.begin(), t.weight.end(), 0.F);
  t.run(muon);
  std::vector<double> update(t.weight.begin(), t.weight.end());
  const auto gram = MuonReference::product(update, MuonReference::transposed(update, 24, 60), 24, 60, 24);
  double trace = 0;
  for (int i = 0; i < 24; ++i) trace += gram[static_cast<std::size_t>(i * 24 + i)];
  EXPECT_NEAR(std::sqrt(trace / 24), 1, 0.25) << "root mean square of the singular values";
}

TEST(MuonTest, AcceptsMatricesOnly) {
  const OptimizerUnderTest muon(kPlugins, "muon");
  for (const auto& shape : std::vector<std::vector<int64_t>>{{7}, {}, {2, 3, 4}}) {
    try {
      const Tensor t(muon, shape);
      FAIL() << shape.size() << " dimensions";
    } catch (const Rejection& rejection) {
      EXPECT_EQ(rejection.code, ZR_UNSUPPORTED);
      EXPECT_EQ(std::string(rejection.what()),
                "'weight' has " + std::to_string(shape.size()) + (shape.size() == 1 ? " dimension" : " dimensions") +
                    ", but muon updates matrices only: add a group of [[optimizer.groups]] with use = \"adamw\" that "
                    "matches it");
    }
  }
}

TEST(MuonTest, CostsMoreForSquareMatrices) {
  const OptimizerUnderTest muon(kPlugins, "muon");
  const auto cost = [&](std::vector<int64_t> shape) {
    const Tensor t(muon, std::move(shape));
    return muon.describe(t.param()).cost;
  };
  EXPECT_EQ(cost({100, 100}), 10000 + 5 * 6e6 / 25);
  EXPECT_EQ(cost({10, 1000}), cost({1000, 10}));
  EXPECT_LT(cost({10, 1000}), cost({100, 100}));
}

}  // namespace
}  // namespace zr::testing
