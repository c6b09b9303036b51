// Unsharded tensors by name, on one rank: what engine.get(), set(), buffer(), set_buffer() and weights_hash() do.
#include "engine/tensor_access.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "base/hex.hpp"
#include "checkpoint/manifest.hpp"
#include "engine/session.hpp"
#include "unit/core/one_rank.hpp"
#include "update/cast.hpp"

namespace zr::testing {
namespace {

using namespace host;
using state::LogicalTensor;

// A session on "b" (70000 elements), "a" (40, also named "tied") and "table" (6, frozen).
struct TensorAccessFixture {
  explicit TensorAccessFixture(const std::vector<std::string>& overrides = {}) {
    model.parameter(1).aliases = {"tied"};
    model.parameter(2).frozen = true;
    session = std::make_unique<engine::Session>(
        one_rank_setup(scratch.folder().string(), overrides, std::make_shared<OneRankControl>()), model);
  }
  engine::TensorAccess& tensors() { return session->tensors(); }
  std::vector<float> read(uint32_t param, LogicalTensor kind = LogicalTensor::value, const std::string& slot = "") {
    std::vector<float> values(static_cast<std::size_t>(model.parameters()[param].count));
    tensors().read(param, kind, slot, values.data());
    return values;
  }
  void backward(float gradient) {
    session->begin_backward(0.5, 1);
    for (const uint32_t param : {1u, 0u}) model.give_gradient(param, gradient);
    session->end_backward();
  }
  std::string statistics() const { return bytes_of(model.statistics); }
  static std::string bytes_of(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
  }
  const test::Scratch scratch;
  FakeModel model{{{"b", 70000}, {"a", 40}, {"table", 6}}};
  std::unique_ptr<engine::Session> session;
};

TEST(TensorAccessTest, FindsParametersByNameAndAlias) {
  const TensorAccessFixture f;
  const engine::TensorAccess& tensors = f.session->tensors();
  EXPECT_EQ(tensors.find("b"), 0u);
  EXPECT_EQ(tensors.find("a"), 1u);
  EXPECT_EQ(tensors.find("tied"), 1u);
  EXPECT_EQ(tensors.find("table"), 2u);
}

TEST(TensorAccessTest, RejectsAnUnknownNameAndSuggestsTheNearest) {
  TensorAccessFixture f;
  EXPECT_EQ(failure_of([&] { f.tensors().find("tabel"); }),
            "the model has no parameter 'tabel'; did you mean 'table'?");
  EXPECT_EQ(failure_of([&] { f.tensors().find("decoder.weight"); }), "the model has no parameter 'decoder.weight'");
}

TEST(TensorAccessTest, ReadsTheValuesOfTheModel) {
  TensorAccessFixture f;
  EXPECT_EQ(f.read(0), FakeModel::initial(70000));
  EXPECT_EQ(f.read(1), FakeModel::initial(40));
  EXPECT_EQ(f.read(2), FakeModel::initial(6));
}

TEST(TensorAccessTest, WritesAValueToTheModelAndAStateToTheOptimizer) {
  TensorAccessFixture f;
  std::vector<float> values(40, 3);
  values[39] = -7;
  f.tensors().write(1, LogicalTensor::value, "", values.data());
  EXPECT_EQ(std::vector<float>(f.model.values(1), f.model.values(1) + 40), values);
  EXPECT_EQ(f.read(1), values);
  const std::vector<float> state(40, 0.125f);
  f.tensors().write(1, LogicalTensor::state, "exp_avg_sq", state.data());
  EXPECT_EQ(f.read(1, LogicalTensor::state, "exp_avg_sq"), state);
  EXPECT_EQ(f.read(1, LogicalTensor::state, "exp_avg"), std::vector<float>(40, 0));
  EXPECT_EQ(f.read(1), values);
  EXPECT_EQ(f.read(0), FakeModel::initial(70000));
}

TEST(TensorAccessTest, WritesTheValueOfAFrozenParameter) {
  TensorAccessFixture f;
  const std::vector<float> values{6, 5, 4, 3, 2, 1};
  f.tensors().write(2, LogicalTensor::value, "", values.data());
  EXPECT_EQ(f.read(2), values);
  EXPECT_EQ(std::vector<float>(f.model.values(2), f.model.values(2) + 6), values);
}

TEST(TensorAccessTest, ValueIsTheMasterAndFollowsWritesOfTheProgram) {
  TensorAccessFixture f({"train.dtype=bf16"});
  std::vector<float> values(40, 1.0f + 1.0f / 1024);  // between two bf16 numbers
  f.tensors().write(1, LogicalTensor::value, "", values.data());
  EXPECT_EQ(f.read(1), values);
  std::vector<float> weights(40);
  update::upcast(f.model.memory[1], ZR_BF16, 40, weights.data());
  EXPECT_EQ(weights, std::vector<float>(40, 1));
  const float two = 2;
  update::downcast(&two, 1, ZR_BF16, static_cast<uint16_t*>(f.model.memory[1]) + 5);
  f.model.written_to = {1};
  values[5] = 2;
  EXPECT_EQ(f.read(1), values);
}

TEST(TensorAccessTest, GradientIsTheMeanOverMicroBatches) {
  TensorAccessFixture f({"train.gradient_accumulation=4"});
  const std::string call = "engine.get('a', zr::TensorKind::gradient): ";
  EXPECT_EQ(failure_of([&] { f.read(1, LogicalTensor::gradient); }),
            call + "this engine has no gradient yet; call engine.get() after engine.backward() and engine.step()");
  for (const float gradient : {1.0f, 2.0f, 3.0f, 8.0f}) {
    f.backward(gradient);
    EXPECT_EQ(failure_of([&] { f.read(1, LogicalTensor::gradient); }),
              call +
                  "the gradient is not reduced over ranks and micro-batches until engine.step() ends the step; call "
                  "engine.get() after engine.step(), which keeps the gradient until the next engine.backward()");
    f.session->step();
  }
  EXPECT_EQ(f.read(1, LogicalTensor::gradient), std::vector<float>(40, 3.5f));
  EXPECT_EQ(f.read(0, LogicalTensor::gradient), std::vector<float>(70000, 3.5f));
}

TEST(TensorAccessTest, RejectsGradientAndStatesOfFrozenParameter) {
  TensorAccessFixture f;
  f.backward(1);
  f.session->step();
  const std::string lacks = "parameter 'table' is frozen: it has no ";
  EXPECT_EQ(failure_of([&] { f.read(2, LogicalTensor::gradient); }), lacks + "gradient and no optimizer state");
  EXPECT_EQ(failure_of([&] { f.read(2, LogicalTensor::state, "exp_avg"); }), lacks + "gradient and no optimizer state");
  const std::vector<float> values(6, 1);
  EXPECT_EQ(failure_of([&] { f.tensors().write(2, LogicalTensor::state, "exp_avg", values.data()); }),
            lacks + "optimizer state");
}

TEST(TensorAccessTest, RejectsToSetAGradient) {
  TensorAccessFixture f;
  const std::vector<float> values(40, 1);
  EXPECT_EQ(failure_of([&] { f.tensors().write(1, LogicalTensor::gradient, "", values.data()); }),
            "engine.set('a', zr::TensorKind::gradient): a gradient cannot be set, because engine.backward() computes "
            "it; set the value or an optimizer state");
}

// The hash of the names and values that docs/engine.md defines: in name order, fp32, a zero byte between.
std::string hash_of_values(const std::vector<std::pair<std::string, std::vector<float>>>& sorted) {
  std::string bytes;
  for (const auto& [name, values] : sorted) bytes += name + '\0' + TensorAccessFixture::bytes_of(values);
  return hex(checkpoint::hash_of(bytes.data(), std::ssize(bytes)));
}

TEST(TensorAccessTest, WeightsHashCoversNamesAndValuesInNameOrder) {
  TensorAccessFixture f;
  const std::vector<float> b = FakeModel::initial(70000), table = FakeModel::initial(6);
  EXPECT_EQ(f.tensors().weights_hash(), hash_of_values({{"a", FakeModel::initial(40)}, {"b", b}, {"table", table}}));
  const std::vector<float> values(40, 3);
  f.tensors().write(1, LogicalTensor::value, "", values.data());
  EXPECT_EQ(f.tensors().weights_hash(), hash_of_values({{"a", values}, {"b", b}, {"table", table}}));
}

TEST(TensorAccessTest, WeightsHashIsThatOfTheMasters) {
  TensorAccessFixture f({"train.dtype=bf16"});
  const std::vector<float> values(40, 1.0f + 1.0f / 1024);
  f.tensors().write(1, LogicalTensor::value, "", values.data());
  std::vector<float> frozen(6);  // has no master: its value is its weight
  update::upcast(f.model.memory[2], ZR_BF16, 6, frozen.data());
  EXPECT_EQ(f.tensors().weights_hash(),
            hash_of_values({{"a", values}, {"b", FakeModel::initial(70000)}, {"table", frozen}}));
}

TEST(TensorAccessTest, ReadsAndSetsABuffer) {
  TensorAccessFixture f;
  EXPECT_EQ(f.tensors().buffer("statistics"), TensorAccessFixture::bytes_of({1, 2, 3}));
  f.tensors().set_buffer("statistics", TensorAccessFixture::bytes_of({7, 8, 9}));
  EXPECT_EQ(f.model.statistics, (std::vector<float>{7, 8, 9}));
  EXPECT_EQ(f.tensors().buffer("statistics"), TensorAccessFixture::bytes_of({7, 8, 9}));
  EXPECT_EQ(failure_of([&] { f.tensors().buffer("mean"); }), "the model has no buffer 'mean'");
}

TEST(TensorAccessTest, RejectsToSetABufferDuringAnEvaluation) {
  TensorAccessFixture f;
  f.session->evaluation(true);
  EXPECT_EQ(failure_of([&] {
              f.tensors().set_buffer("statistics", TensorAccessFixture::bytes_of({7, 8, 9}));
            }),
            "engine.set_buffer('statistics') was called during a zr::Engine::Evaluation, which restores the buffer's "
            "earlier value when it ends; call it before or after the evaluation");
  EXPECT_EQ(f.statistics(), TensorAccessFixture::bytes_of({1, 2, 3}));
  f.session->evaluation(false);
  f.tensors().set_buffer("statistics", TensorAccessFixture::bytes_of({7, 8, 9}));
  EXPECT_EQ(f.statistics(), TensorAccessFixture::bytes_of({7, 8, 9}));
}

}  // namespace
}  // namespace zr::testing
