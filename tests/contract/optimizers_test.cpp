// Loads the optimizer plug-ins as the host does and compares them with an independent implementation.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "contract/optimizer_problem.hpp"

namespace zr::testing {
namespace {

const std::vector<std::string> kIsas = {"portable", "avx2", "avx512"};

struct Case {
  std::string id;
  Values values;
  std::string name;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }
const std::vector<Case> kCases = {
    {"adamw", {}, "adamw"},
    {"adamw", {{"beta1", 0.8}, {"beta2", 0.95}, {"eps", 1e-6}, {"weight_decay", 0.3}}, "adamw_with_other_keys"},
    {"adamw", {{"weight_decay", 0}}, "adamw_without_decay"},
    {"sgd", {}, "sgd"},
    {"sgd", {{"weight_decay", 0.01}}, "sgd_with_decay"},
    {"sgd", {{"momentum", 0.9}}, "sgd_with_momentum"},
    {"sgd", {{"momentum", 0.9}, {"dampening", 0.5}, {"weight_decay", 0.01}}, "sgd_with_dampening"},
    {"sgd", {{"momentum", 0.9}, {"nesterov", 1}, {"weight_decay", 0.01}}, "sgd_with_nesterov"},
};

class OptimizersTest : public ::testing::TestWithParam<Case> {
 protected:
  OptimizersTest() : optimizer_(kPlugins, GetParam().id, GetParam().values) {}
  Problem problem(int64_t count, zr_dtype dtype = ZR_F32) const {
    return Problem(count, optimizer_.describe().n_slots, dtype);
  }
  OptimizerUnderTest optimizer_;
};
INSTANTIATE_TEST_SUITE_P(All, OptimizersTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

/// The order of operations of docs/numerics.md and docs/optimizers.md, in type T: float gives the same bits, double a
/// reference.
template <class T>
void reference(const Case& one, const Problem& p, int64_t i, T& w, T* slots) {
  const auto key = [&](const char* name, double standard) {
    const auto found = one.values.find(name);
    return found == one.values.end() ? standard : found->second;
  };
  const T g = T(p.grad[i]) * T(p.grad_mul);
  if (one.id == "adamw") {
    const double beta1 = key("beta1", 0.9), beta2 = key("beta2", 0.999), t = double(p.step);
    const double correction = std::sqrt(1 - std::pow(beta2, t));
    const T decay = T(1 - p.lr * key("weight_decay", 0.01)), rate = T(p.lr * correction / (1 - std::pow(beta1, t)));
    slots[0] = slots[0] * T(beta1) + g * T(1 - beta1);
    slots[1] = slots[1] * T(beta2) + (g * T(1 - beta2)) * g;
    w = w * decay - (slots[0] * rate) / (std::sqrt(slots[1]) + T(key("eps", 1e-8) * correction));
    return;
  }
  const double momentum = key("momentum", 0), decay = key("weight_decay", 0);
  T d = decay != 0 ? g + w * T(decay) : g;
  if (momentum != 0) {
    slots[0] = p.step == 1 ? d : slots[0] * T(momentum) + d * T(1 - key("dampening", 0));
    d = key("nesterov", 0) != 0 ? d + slots[0] * T(momentum) : slots[0];
  }
  w = w - d * T(p.lr);
}

TEST_P(OptimizersTest, FollowTheDocumentedOrderBitForBit) {
  Problem p = problem(4099);
  for (p.step = 1; p.step <= 5; ++p.step) {
    Problem expected = p;
    for (int64_t i = 0; i < p.count; ++i) {
      float slots[2] = {};
      for (std::size_t s = 0; s < p.slots.size(); ++s) slots[s] = p.slots[s][i];
      reference<float>(GetParam(), p, i, expected.weight[i], slots);
      for (std::size_t s = 0; s < p.slots.size(); ++s) expected.slots[s][i] = slots[s];
    }
    p.run(optimizer_);
    EXPECT_TRUE(p.same_bits(expected)) << "step " << p.step;
    p.new_gradient();
  }
}

TEST_P(OptimizersTest, DifferFromFp64ByAtMostFourUlpPerStep) {
  Problem p = problem(100003);
  for (const int64_t step : {1, 2, 10, 100}) {
    for (; p.step < step; ++p.step) {  // the states and weights after this many steps
      p.run(optimizer_);
      p.new_gradient();
    }
    const Problem before = p;
    Problem sizes = p;
    for (float& g : sizes.grad) g = std::fabs(g);
    p.run(optimizer_);
    double worst = 0, worst_of_small_weights = 0;
    for (int64_t i = 0; i < p.count; ++i) {
      const double old = before.weight[i];
      double w = old, slots[2] = {}, w_of_sizes = std::fabs(old), slots_of_sizes[2] = {};
      for (std::size_t s = 0; s < p.slots.size(); ++s) {
        slots[s] = before.slots[s][i];
        slots_of_sizes[s] = std::fabs(slots[s]);
      }
      reference<double>(GetParam(), before, i, w, slots);
      reference<double>(GetParam(), sizes, i, w_of_sizes, slots_of_sizes);
      const auto ulps = [&](double scale) {
        const float size = static_cast<float>(scale);
        return std::fabs(w - double(p.weight[i])) / (std::nextafter(size, INFINITY) - size);
      };
      // After step 1 a gradient may cancel the stored states. Then the ulp is that of the cancelled terms, because fp32
      // does not represent the remainder more precisely.
      const double update = std::max(std::fabs(w - old), step == 1 ? 0 : std::fabs(w_of_sizes - std::fabs(old)));
      if (step == 1 || std::fabs(old) >= update) {
        worst = std::max(worst, ulps(std::max(std::fabs(old), update)));
      } else {
        worst_of_small_weights = std::max(worst_of_small_weights, ulps(update));
      }
    }
    RecordProperty("worst_ulp_at_step_" + std::to_string(step),
                   std::to_string(worst) + " " + std::to_string(worst_of_small_weights));
    EXPECT_LE(worst, 4) << "step " << step;
    EXPECT_LE(worst_of_small_weights, 5) << "step " << step;
  }
}

TEST_P(OptimizersTest, GiveTheSameBitsForAnySlicing) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
    for (const bool large : {false, true}) {
      Problem whole = problem(9973, dtype);
      whole.shape[0] = large ? int64_t{1} << 30 : whole.count;
      Problem cut = whole;
      whole.run(optimizer_);
      uint32_t random = 7;
      std::vector<std::pair<int64_t, int64_t>> runs;
      for (int64_t first = 0; first < cut.count;) {
        random = random * 1664525u + 1013904223u;
        const int64_t n = std::min<int64_t>(cut.count - first, (random >> 20) % (runs.size() % 3 == 0 ? 2500 : 40) + 1);
        runs.emplace_back(first, n);
        first += n;
      }
      std::reverse(runs.begin(), runs.end());
      cut.run(optimizer_, runs);
      EXPECT_TRUE(cut.same_bits(whole)) << "dtype " << dtype << (large ? ", a large parameter" : "");
    }
  }
}

TEST_P(OptimizersTest, GiveTheSameBitsWhenWeightsAreACopy) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
    Problem there = problem(9973, dtype);
    there.shape[0] = int64_t{1} << 30;  // larger than any cache
    Problem copy = there;
    copy.flags = ZR_SLICE_WEIGHT_COPY;
    there.run(optimizer_);
    copy.run(optimizer_);
    EXPECT_TRUE(copy.same_bits(there)) << "dtype " << dtype;
  }
}

TEST_P(OptimizersTest, GiveTheSameBitsUnderEveryInstructionSet) {
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16, ZR_F16}) {
    const Problem start = problem(8209, dtype);
    std::vector<Problem> results;
    for (const std::string& isa : kIsas) {
      setenv("ZR_ISA", isa.c_str(), 1);
      const OptimizerUnderTest capped(kPlugins, GetParam().id, GetParam().values);
      unsetenv("ZR_ISA");
      results.push_back(start);
      results.back().run(capped);
    }
    EXPECT_TRUE(results[1].same_bits(results[0])) << kIsas[1] << ", dtype " << dtype;
    EXPECT_TRUE(results[2].same_bits(results[0])) << kIsas[2] << ", dtype " << dtype;
  }
}

TEST_P(OptimizersTest, RoundTheMasterTo16BitWeightsOnce) {
  for (const zr_dtype dtype : {ZR_BF16, ZR_F16}) {
    for (const bool large : {false, true}) {
      for (const int64_t shift : {0, 1, 17, 31}) {  // offset of `out` from a cache line
        Problem wide = problem(5003), narrow = problem(5003, dtype);
        narrow.shape[0] = large ? int64_t{1} << 30 : narrow.count;
        narrow.shift = shift;
        wide.run(optimizer_);
        narrow.run(optimizer_);
        EXPECT_EQ(narrow.weight, wide.weight);
        for (int64_t i = 0; i < narrow.count; ++i) {
          ASSERT_EQ(narrow.out()[i], dtype == ZR_BF16 ? to_bf16(wide.weight[i]) : to_f16(wide.weight[i])) << i;
        }
        EXPECT_EQ(narrow.out()[-1], Problem::kUntouched);
        EXPECT_EQ(narrow.out()[narrow.count], Problem::kUntouched);
      }
    }
  }
}

TEST_P(OptimizersTest, AllowTwoThreadsToStepAtOnce) {
  Problem alone = problem(20000), shared = alone;
  alone.run(optimizer_);
  std::thread other([&] { shared.run(optimizer_, {{0, 9001}}); });
  shared.run(optimizer_, {{9001, 10999}});
  other.join();
  EXPECT_TRUE(shared.same_bits(alone));
}

TEST_P(OptimizersTest, PropagateNonFiniteGradients) {
  Problem p = problem(64);
  p.grad[3] = NAN;
  p.grad[5] = INFINITY;
  p.run(optimizer_);
  EXPECT_TRUE(std::isnan(p.weight[3]));
  EXPECT_FALSE(std::isfinite(p.weight[5]));
  EXPECT_TRUE(std::isfinite(p.weight[4]));
}

TEST_P(OptimizersTest, ChangeNothingIfOneSliceIsInvalid) {
  Problem good = problem(100), bad = problem(100);
  Problem before = good;
  auto good_slice = good.slice(0, good.count), bad_slice = bad.slice(0, bad.count);
  bad_slice->slice.grad.dtype = ZR_BF16;
  zr_done_s done;
  try {
    optimizer_.step(good.job(), {good_slice->get(), bad_slice->get()}, &done);
    FAIL();
  } catch (const Rejection& rejection) {
    EXPECT_EQ(rejection.code, ZR_INVALID);
    EXPECT_STREQ(rejection.what(), "parameter weight: the reduced gradient must be fp32, not dtype 2");
  }
  EXPECT_TRUE(good.same_bits(before));
  EXPECT_EQ(done.resolved, 0);
}

TEST_P(OptimizersTest, ResolveACompletionOnce) {
  Problem p = problem(10);
  zr_done_s done;
  const auto slice = p.slice(0, p.count);
  optimizer_.step(p.job(), {slice->get()}, &done);
  EXPECT_EQ(done.resolved, 1);
  EXPECT_EQ(done.code, ZR_OK);
  EXPECT_EQ(done.references, 1);
}

TEST_P(OptimizersTest, DescribeTheirStates) {
  const zr_optimizer_desc desc = optimizer_.describe();
  EXPECT_EQ(desc.size, sizeof desc);
  EXPECT_EQ(desc.granularity, ZR_ELEMENTWISE);
  EXPECT_EQ(desc.needs, 0u);
  EXPECT_EQ(desc.device_types, uint64_t{1} << ZR_DEVICE_CPU);
  std::vector<std::string> names;
  for (uint32_t i = 0; i < desc.n_slots; ++i) {
    names.push_back(desc.slots[i].name);
    EXPECT_EQ(desc.slots[i].dtype, ZR_F32);
    EXPECT_EQ(desc.slots[i].shape, ZR_SLOT_LIKE_PARAM);
  }
  using Names = std::vector<std::string>;
  const bool momentum = GetParam().values.count("momentum") > 0;
  EXPECT_EQ(names, GetParam().id == "adamw" ? Names({"exp_avg", "exp_avg_sq"})
                   : momentum               ? Names({"momentum_buffer"})
                                            : Names());
}

TEST_P(OptimizersTest, FillOnlyTheDescriptionFieldsThatTheHostKnows) {
  zr_optimizer_desc desc;
  std::memset(&desc, 0x5a, sizeof desc);
  desc.size = offsetof(zr_optimizer_desc, n_slots);
  zr_error error = OptimizerUnderTest::no_error();
  const zr_param param = OptimizerUnderTest::a_parameter();
  EXPECT_EQ(optimizer_.api().describe(optimizer_.self(), &param, &desc, &error), ZR_OK);
  EXPECT_EQ(desc.size, offsetof(zr_optimizer_desc, n_slots));
  EXPECT_EQ(desc.granularity, ZR_ELEMENTWISE);
  EXPECT_EQ(desc.n_slots, 0x5a5a5a5au);
}

TEST_P(OptimizersTest, DeclareKeysThatTheHostCanValidateAndExplain) {
  const zr_component& component = optimizer_.component();
  EXPECT_STREQ(component.kind, "zr.optimizer/1");
  EXPECT_EQ(component.id, GetParam().id);
  EXPECT_LE(optimizer_.module().need_minor, ZR_ABI_MINOR);
  ASSERT_GT(component.n_keys, 0u);
  for (uint32_t i = 0; i < component.n_keys; ++i) {
    const zr_key& key = *component.keys[i];
    const std::string meaning = key.meaning;
    EXPECT_EQ(key.size, sizeof key);
    EXPECT_FALSE(meaning.empty() || meaning.back() == '.' || meaning.find('\n') != std::string::npos) << key.name;
    ASSERT_NE(key.def, nullptr) << key.name;
    if (key.type == ZR_KEY_FLOAT) {
      EXPECT_GE(std::stod(key.def), key.min) << key.name;
      EXPECT_LE(std::stod(key.def), key.max) << key.name;
    }
  }
}

TEST(OptimizerGroupsTest, HaveTheirOwnValues) {
  OptimizerUnderTest adamw(kPlugins, "adamw", {{"weight_decay", 0.5}}), plain(kPlugins, "adamw", {{"weight_decay", 0}});
  adamw.add_group(1, {{"weight_decay", 0}});
  Problem grouped(500, 2), alone = grouped, decayed = grouped;
  grouped.group = 1;
  grouped.run(adamw);
  alone.run(plain);
  decayed.run(adamw);
  EXPECT_TRUE(grouped.same_bits(alone));
  EXPECT_FALSE(decayed.same_bits(alone));
}

TEST(OptimizerGroupsTest, MustBeAddedInOrder) {
  OptimizerUnderTest adamw(kPlugins, "adamw");
  const auto text_of = [](const auto& call) -> std::string {
    try {
      call();
      return "accepted";
    } catch (const Rejection& rejection) {
      return rejection.what();
    }
  };
  EXPECT_EQ(text_of([&] { adamw.add_group(2, {}); }), "add_group: group 2 was added, but group 1 is next");
  Problem p(10, 2);
  p.group = 1;
  EXPECT_EQ(text_of([&] { p.run(adamw); }), "parameter weight: group 1 is out of range (1 groups)");
}

TEST(OptimizerErrorsTest, NameTheKeyAndTheRemedy) {
  const auto text_of = [](const std::string& id, const Values& values) -> std::string {
    try {
      OptimizerUnderTest optimizer(kPlugins, id, values);
      return "accepted";
    } catch (const Rejection& rejection) {
      EXPECT_EQ(rejection.code, ZR_INVALID);
      return rejection.what();
    }
  };
  EXPECT_EQ(text_of("sgd", {{"nesterov", 1}}),
            "nesterov = true needs momentum above 0 and dampening = 0: set those, or nesterov = false");
  EXPECT_EQ(text_of("sgd", {{"nesterov", 1}, {"momentum", 0.9}, {"dampening", 0.1}}),
            "nesterov = true needs momentum above 0 and dampening = 0: set those, or nesterov = false");
  setenv("ZR_ISA", "sse9", 1);
  EXPECT_EQ(text_of("adamw", {}),
            "the environment variable ZR_ISA is \"sse9\"; set it to portable, avx2 or avx512, or unset it");
  unsetenv("ZR_ISA");
}

TEST(OptimizerErrorsTest, NameAServiceThatTheHostDoesNotOffer) {
  OptimizerUnderTest adamw(kPlugins, "adamw");
  const zr_host bare = make_host(false);
  const zr_config_s config;
  zr_error error = OptimizerUnderTest::no_error();
  void* self = &error;
  EXPECT_EQ(adamw.component().create(&bare, &config, &self, &error), ZR_UNSUPPORTED);
  EXPECT_STREQ(error.msg, "needs the service \"zr.host.config/1\", which this engine does not offer");
  EXPECT_EQ(self, &error) << "outputs are untouched on failure";
}

TEST(OptimizerErrorsTest, NameAKeyThatTheHostDoesNotKnow) {
  OptimizerUnderTest adamw(kPlugins, "adamw");
  const zr_host host = make_host();
  const zr_config_s empty;
  zr_error error = OptimizerUnderTest::no_error();
  void* self = nullptr;
  EXPECT_EQ(adamw.component().create(&host, &empty, &self, &error), ZR_INVALID);
  EXPECT_STREQ(error.msg, "key \"beta1\" was read, but this component has no such key of that type");
}

}  // namespace
}  // namespace zr::testing
