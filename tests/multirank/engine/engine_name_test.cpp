// Several engines in one program, and their names.
#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>

#include "support/engine_test.hpp"

namespace {

using namespace engine_tests;
using testing::HasSubstr;
using zr::test::RankBody;

class EngineNameTest : public EngineTest {
 protected:
  // A job of two ranks with ENGINE_NAME set.
  Result named(const std::string& name, const RankBody& body, const std::string& overrides = "") {
    return launch(2, program(2, body, overrides), "ENGINE_NAME='" + name + "'");
  }
  std::vector<int64_t> steps(const std::string& name) const {
    std::vector<int64_t> all;
    for (const auto& row : metrics(name)) all.push_back(row["step"]);
    return all;
  }
};

constexpr int64_t kNoise = 5, kSample = 7, kBatch = 3;

// Random numbers that depend only on step, micro-batch and purpose.
torch::Tensor numbers(int64_t step, int64_t micro, int64_t purpose, int64_t columns) {
  return torch::randn({kBatch, columns}, at::make_generator<at::CPUGeneratorImpl>(
                                             static_cast<uint64_t>((step * 64 + micro) * 4 + purpose + 1)));
}

// Two models that train each other.
struct Pair {
  explicit Pair(uint64_t seed) {
    torch::manual_seed(seed);
    generator = torch::nn::Sequential(torch::nn::Linear(kNoise, 16), torch::nn::Tanh(), torch::nn::Linear(16, kSample));
    discriminator = torch::nn::Sequential(torch::nn::Linear(kSample, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  }
  torch::nn::Sequential generator{nullptr}, discriminator{nullptr};
  torch::Tensor fake(int64_t step, int64_t micro, int64_t purpose) {
    return generator->forward(numbers(step, micro, purpose, kNoise));
  }
  torch::Tensor classification_loss(const torch::Tensor& samples, bool real) {
    const auto logits = discriminator->forward(samples);
    return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, real ? 1.0 : 0.0));
  }
  torch::Tensor discriminator_loss(int64_t step, int64_t micro) {
    return classification_loss(numbers(step, micro, 0, kSample) + 1, true) +
           classification_loss(fake(step, micro, 1).detach(), false);
  }
  torch::Tensor generator_loss(int64_t step, int64_t micro) { return classification_loss(fake(step, micro, 2), true); }
  void learn(bool discriminator_learns) {
    for (auto& p : discriminator->parameters()) p.requires_grad_(discriminator_learns);
  }
};

// The losses of generator and discriminator per step, trained with plain libtorch in one process.
std::vector<std::pair<double, double>> plain(const zr::Program& program, int64_t steps, int64_t micros) {
  Pair pair(7);
  const auto options = torch::optim::AdamWOptions(program.number("optimizer.lr")).weight_decay(0.01);
  torch::optim::AdamW generator(pair.generator->parameters(), options),
      discriminator(pair.discriminator->parameters(), options);
  std::vector<std::pair<double, double>> losses;
  for (int64_t step = 0; step < steps; ++step) {
    double d = 0, g = 0;
    const auto mean = [&](torch::Tensor loss, double& sum) {
      loss = loss / static_cast<double>(micros);
      loss.backward();
      sum += loss.item<double>();
    };
    discriminator.zero_grad();
    for (int64_t m = 0; m < micros; ++m) mean(pair.discriminator_loss(step, m), d);
    discriminator.step();
    pair.learn(false);
    generator.zero_grad();
    for (int64_t m = 0; m < micros; ++m) mean(pair.generator_loss(step, m), g);
    generator.step();
    pair.learn(true);
    losses.emplace_back(g, d);
  }
  return losses;
}

// Trains each model with its own engine. The loss of every step must equal plain libtorch's.
RANK_BODY(gan, Run) {
  Pair pair(run.program.rank() == 0 ? 7 : 8);
  zr::Engine generator(run.program, *pair.generator, "generator");
  zr::Engine discriminator(run.program, *pair.discriminator, "discriminator");
  if (generator.step_index() != discriminator.step_index())
    throw std::runtime_error("the engines resume from different steps");
  const int64_t micros = generator.world() * generator.accumulation();
  const auto expected = plain(run.program, generator.steps(), micros);
  while (!generator.done()) {
    const int64_t step = generator.step_index();
    for (int a = 0; a < discriminator.accumulation(); ++a) {
      discriminator.backward(pair.discriminator_loss(step, discriminator.micro_index()));
      discriminator.step();
    }
    pair.learn(false);
    for (int a = 0; a < generator.accumulation(); ++a) {
      generator.backward(pair.generator_loss(step, generator.micro_index()));
      generator.step();
    }
    pair.learn(true);
    const auto [g, d] = expected[static_cast<std::size_t>(step)];
    EXPECT_TRUE(std::abs(generator.last_loss() - g) < 1e-5 * g && std::abs(discriminator.last_loss() - d) < 1e-5 * d)
        << "step " + std::to_string(step) + ": losses are " + std::to_string(generator.last_loss()) + " and " +
               std::to_string(discriminator.last_loss()) + "; plain libtorch's are " + std::to_string(g) + " and " +
               std::to_string(d);
  }
}

RANK_BODY(trains_through_a_model_that_is_not_frozen, Run) {
  Pair pair(7);
  zr::Engine generator(run.program, *pair.generator, "generator");
  const zr::Engine discriminator(run.program, *pair.discriminator, "discriminator");
  generator.backward(pair.generator_loss(0, 0));
}

TEST_F(EngineNameTest, TwoEnginesTrainAGanAndBothResume) {
  for (const std::string how :
       {"strategy=zero0", "strategy=zero1 communicator.share_weights=false",
        "strategy=zero3 communicator.share_weights=false train.gradient_accumulation=2", "strategy=zero3"}) {
    fs::remove_all(folder_ / "ck");
    fs::remove_all(folder_ / "run");
    const std::string words = how + " optimizer.lr=0.01 checkpoint.every=2 checkpoint.dir=" + (folder_ / "ck").string();
    const Result all = run(2, gan, words + " train.steps=6 job.name=all");
    ASSERT_EQ(all.code, 0) << how << "\n" << all.output;
    fs::remove_all(folder_ / "ck");
    const Result first = run(2, gan, words + " train.steps=4");
    ASSERT_EQ(first.code, 0) << how << "\n" << first.output;
    const Result rest = run(2, gan, words + " train.steps=6 checkpoint.resume=true");
    ASSERT_EQ(rest.code, 0) << how << "\n" << rest.output;
    for (const std::string engine : {"generator", "discriminator"}) {
      const auto rows = metrics("run/" + engine), reference = metrics("all/" + engine);
      ASSERT_EQ(rows.size(), 6u);
      for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]["loss"], reference[i]["loss"]) << how << " " << i;
      EXPECT_EQ(summary("run/" + engine)["weights_hash"], summary("all/" + engine)["weights_hash"]) << how;
      EXPECT_TRUE(fs::exists(folder_ / "ck" / engine / "step-00000006"));
    }
    EXPECT_NE(summary("run/generator")["weights_hash"], summary("run/discriminator")["weights_hash"]);
    EXPECT_EQ(rest.output.find("saved when engine"), std::string::npos) << "both were saved at the same step\n"
                                                                        << rest.output;
  }
}

// The state that a crash between the two saves of a step leaves.
TEST_F(EngineNameTest, ReportsEnginesThatResumeFromDifferentSteps) {
  const std::string ck = (folder_ / "ck").string(),
                    words = "strategy=zero1 checkpoint.every=2 checkpoint.dir=" + ck + " train.steps=";
  ASSERT_EQ(run(2, gan, words + "4").code, 0);
  fs::rename(ck + "/generator/step-00000004", ck + "/kept");
  const Result behind = run(2, gan, words + "4 checkpoint.resume=true job.name=behind");
  EXPECT_EQ(behind.code, 1) << "the body throws if the engines are at different steps";
  EXPECT_THAT(behind.output, HasSubstr("engine 'generator' resumes from step 2, saved when engine 'discriminator' was "
                                       "at step 2, but engine 'discriminator' starts from step 4: the job ended "
                                       "between their saves, or a checkpoint was removed; to resume both from the same "
                                       "point, remove the checkpoints of 'discriminator' after step 2 in " +
                                       ck + "/discriminator and resume again"));
}

RANK_BODY(one_after_another, Run) {
  for (int i = 0; i < 2; ++i) {
    run.build();
    run.train();
    run.engine.reset();
  }
}

TEST_F(EngineNameTest, SecondEngineOfTheSameNameStartsANewRun) {
  ASSERT_EQ(run(2, one_after_another, "train.steps=2").code, 0);
  EXPECT_EQ(steps("run/1"), steps("run/2"));
  EXPECT_EQ(summary("run/1")["weights_hash"], summary("run/2")["weights_hash"]);
}

// A second engine of the same name while the first is alive.
void two_engines(Run& run, const std::string& name) {
  Pair pair(7);
  zr::Engine first(run.program, *pair.generator, name);
  zr::Engine second(run.program, *pair.discriminator, name);
}

const zr::test::RankBodyOf<Run> same_name("same_name", [](Run& run) { two_engines(run, "generator"); });

const zr::test::RankBodyOf<Run> no_names("no_names", [](Run& run) { two_engines(run, ""); });

RANK_BODY(bad_name, Run) {
  Pair pair(7);
  const char* name = std::getenv("ENGINE_NAME");
  zr::Engine engine(run.program, *pair.generator, name ? name : "a/b");
}

// Some cases of engine_use_errors.txt run bodies of run_folder_test.cpp and weight_digest_test.cpp.
TEST_F(EngineNameTest, ReportsMistakesWithNamesAndSteps) { check_messages("engine_use_errors.txt", 7); }

TEST_F(EngineNameTest, RejectsNamesThatAreNotValidFolderNames) {
  for (const std::string name : {"a/b", "..", "1", "lock", "latest", "step-00000001", "metrics.jsonl", "a b"}) {
    const Result result = named(name, bad_name);
    EXPECT_EQ(result.code, 2) << name << "\n" << result.output;
    EXPECT_THAT(result.output, HasSubstr("zr::Engine(program, model, \"" + name + "\"): an engine's name is 1 to 64 " +
                                         "letters, digits, '-' and '_', begins with a letter"));
  }
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

}  // namespace
