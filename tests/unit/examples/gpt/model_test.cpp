#include "model.hpp"

#include <gtest/gtest.h>

namespace {

const gpt::Shape kSmall{2, 32, 4, 16, 0};
const bool kOneThread = (torch::set_num_threads(1), true);  // small matrices: more threads would only wait

torch::Tensor some_bytes(int64_t samples, int64_t length) {
  return torch::randint(0, gpt::kVocabulary, {samples, length}, torch::kLong);
}

TEST(GptModelTest, HasTheNumberOfParametersOfTheFormula) {
  const gpt::Shape c;
  gpt::Model model(c);
  int64_t count = 0;
  for (const auto& p : model->parameters()) {
    count += p.numel();
  }
  const auto w = c.width;
  const auto block = 12 * w * w + 13 * w;  // matrices 3 + 1 + 4 + 4, their biases, two norms
  EXPECT_EQ(count, 256 * w + c.context * w + c.layers * block + 2 * w);
  EXPECT_EQ(count, 1853568);
}

TEST(GptModelTest, HasTheVocabularyAndTheWidthsOfTheShape) {
  gpt::Shape shape = kSmall;
  shape.vocabulary = 300;
  shape.head_width = 5;
  shape.inner_width = 7;
  gpt::Model model(shape);
  const auto sizes = [&](const char* name) { return model->named_parameters()[name].sizes().vec(); };
  EXPECT_EQ(sizes("wte.weight"), (std::vector<int64_t>{300, 32}));
  EXPECT_EQ(sizes("blocks.0.qkv.weight"), (std::vector<int64_t>{3 * 4 * 5, 32}));
  EXPECT_EQ(sizes("blocks.0.proj.weight"), (std::vector<int64_t>{32, 4 * 5}));
  EXPECT_EQ(sizes("blocks.0.up.weight"), (std::vector<int64_t>{7, 32}));
  EXPECT_EQ(sizes("blocks.0.down.weight"), (std::vector<int64_t>{32, 7}));
  EXPECT_EQ(model->forward(some_bytes(2, 16)).sizes().vec(), (std::vector<int64_t>{2, 16, 300}));
}

// The patterns of gpt.toml and the rule of plain.cpp exempt the same parameters from weight decay.
TEST(GptModelTest, NamesEveryTensorThatIsNotAMatrixAsBiasOrNorm) {
  const auto ends = [](const std::string& name, const std::string& end) {
    return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
  };
  gpt::Model model(kSmall);
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    const bool excepted = ends(name, ".bias") || (name.find("ln") != name.npos && ends(name, ".weight"));
    EXPECT_EQ(item.value().dim() == 2, !excepted) << name;
  }
}

TEST(GptModelTest, IsCausal) {
  torch::manual_seed(1);
  gpt::Model model(kSmall);
  const auto bytes = some_bytes(2, 16);
  auto changed = bytes.clone();
  changed.select(1, 10) = (changed.select(1, 10) + 1) % 256;
  const auto before = model->forward(bytes), after = model->forward(changed);
  EXPECT_TRUE(before.slice(1, 0, 10).allclose(after.slice(1, 0, 10), 0, 1e-6));
  EXPECT_FALSE(before.select(1, 10).allclose(after.select(1, 10), 0, 1e-6));
}

TEST(GptModelTest, StartsAtTheEntropyOfAUniformGuess) {
  torch::manual_seed(1);
  gpt::Model model(gpt::Shape{});
  EXPECT_NEAR(model->loss(some_bytes(8, 128), some_bytes(8, 128)).item<double>(), std::log(256.0), 0.1);
}

TEST(GptModelTest, TrainsInBf16WithAnFp32Loss) {
  torch::manual_seed(1);
  gpt::Model model(kSmall);
  model->to(torch::kBFloat16);
  const auto loss = model->loss(some_bytes(4, 16), some_bytes(4, 16));
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  loss.backward();
  for (const auto& p : model->parameters()) {
    EXPECT_EQ(p.grad().scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(p.grad().isfinite().all().item<bool>());
  }
}

TEST(GptModelTest, AppliesDropoutInTrainingOnly) {
  torch::manual_seed(1);
  auto config = kSmall;
  config.dropout = 0.5;
  gpt::Model model(config);
  const auto bytes = some_bytes(2, 16);
  EXPECT_FALSE(model->forward(bytes).equal(model->forward(bytes)));
  model->eval();
  EXPECT_TRUE(model->forward(bytes).equal(model->forward(bytes)));
}

TEST(GptModelTest, SamplesDeterministicallyWithoutChangingTheGlobalRandomState) {
  torch::manual_seed(1);
  gpt::Model model(kSmall);
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  const auto one = model->sample("abc", 40, 5);
  EXPECT_TRUE(before.equal(at::detail::getDefaultCPUGenerator().get_state()));
  EXPECT_EQ(one.size(), 43u);
  EXPECT_EQ(one.substr(0, 3), "abc");
  EXPECT_EQ(model->sample("abc", 40, 5), one);
  EXPECT_NE(model->sample("abc", 40, 6), one);
}

TEST(GptModelTest, RejectsAWidthThatHeadsDoNotDivide) {
  auto config = kSmall;
  config.heads = 5;
  EXPECT_THROW(gpt::Model{config}, std::invalid_argument);
}

}  // namespace
