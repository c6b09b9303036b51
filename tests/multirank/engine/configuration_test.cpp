// zr::Configuration: jobs without a TOML file.
#include "support/engine_test.hpp"
#include "support/user_error.hpp"

namespace {

using namespace engine_tests;
using zr::test::user_error_of;

class EngineConfigurationTest : public EngineTest {};

// Trains a small model and returns its hash.
std::string hash_of(const zr::Program& program) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(6, 5), torch::nn::Linear(5, 2));
  zr::Engine engine(program, *model);
  while (!engine.done()) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<uint64_t>(100 * engine.step_index() + engine.micro_index()));
    engine.backward(model->forward(torch::randn({4, 6}, generator)).square().mean());
    engine.step();
  }
  return engine.weights_hash();
}

MULTIRANK_TEST(EngineConfigurationTest, TrainsLikeTheSameFile, {1, 2}) {
  const fs::path file = fs::temp_directory_path() / ("same-" + std::to_string(::getpid()) + ".toml");
  std::ofstream(file) << "[optimizer]\nuse = \"adamw\"\nlr = 0.25\n"
                         "[[optimizer.groups]]\nmatch = [\"*.bias\"]\nlr_scale = 0.5\nweight_decay = 0.0\n"
                         "[strategy]\nuse = \"zero2\"\nzero2 = { bucket_bytes = \"64KiB\" }\n[train]\nsteps = "
                         "3\ngradient_clipping = 0.5\n"
                         "[job]\nname = \"file\"\n";
  zr::Configuration config("[strategy.zero2]\nbucket_bytes = \"64KiB\"\n[train]\nsteps = 99\n");
  config.set("strategy", "zero2").set("optimizer", "adamw").set("optimizer.lr", 0.25).set("train.steps", 3);
  config.set("train.gradient_clipping", 0.5).set("job.name", "composed").set("job.trace", false);
  config.add_group({"*.bias"}, {{"lr_scale", 0.5}, {"weight_decay", 0}});
  const std::string expected = hash_of(zr::Program(file.string()));
  fs::remove(file);
  EXPECT_EQ(hash_of(zr::Program(config)), expected);
  EXPECT_NE(hash_of(zr::Program(config, {"optimizer.lr=0.125", "job.name=other"})), expected);
}

MULTIRANK_TEST(EngineConfigurationTest, NamesTheOriginOfValues, {1}) {
  zr::Configuration config("[train]\nmicro_batch = 2\n");
  config.set("train.steps", 20).set("train.seed", int64_t{5});
  const zr::Program program(config, {"train.seed=6"}, {{"model.width", 8, "width"}});
  EXPECT_EQ(program.origin("train.steps"), "zr::Configuration");
  EXPECT_EQ(program.origin("train.micro_batch"), "zr::Configuration:2:15");
  EXPECT_EQ(program.origin("train.seed"), "command line");
  EXPECT_EQ(program.integer("train.seed"), 6);
  EXPECT_EQ(program.integer("model.width"), 8);
  EXPECT_EQ(program.folder(), fs::current_path().string());
}

MULTIRANK_TEST(EngineConfigurationTest, ReportsUnknownKeysAndWrongValues, {1}) {
  EXPECT_EQ(user_error_of([] { zr::Program(zr::Configuration().set("train.step", 20)); }),
            "zr::Configuration: unknown key 'train.step'; did you mean 'train.steps'?");
  EXPECT_EQ(user_error_of([] { zr::Program(zr::Configuration().set("train steps", 20)); }),
            "zr::Configuration::set: 'train steps' is not a dotted path of bare keys such as train.steps");
  EXPECT_EQ(user_error_of([] { zr::Program(zr::Configuration("[train]\nsteps = \"a\"\n")); }),
            "zr::Configuration:2:9: train.steps: expected an integer, found \"a\"");
}

MULTIRANK_TEST(EngineConfigurationTest, NamesTheRunAfterTheProgram, {1}) {
  EXPECT_EQ(zr::Program(zr::Configuration()).text("job.name"), fs::read_symlink("/proc/self/exe").filename().string());
  EXPECT_EQ(zr::Program(zr::Configuration("[job]\nname = \"mine\"\n")).text("job.name"), "mine");
  EXPECT_EQ(zr::Program(zr::Configuration().set("job.name", "other")).text("job.name"), "other");
}

MULTIRANK_TEST(EngineConfigurationTest, RejectsTextThatIsNotAKey, {1}) {
  zr::Configuration config;
  for (const std::string path : {"", "job.name=abc", "train..steps", ".train", "train.", "train.steps # 3", "a\nb"})
    EXPECT_NE(
        user_error_of([&] { config.set(path, 3); }).find("' is not a dotted path of bare keys such as train.steps"),
        std::string::npos)
        << path;
  EXPECT_EQ(user_error_of([&] { config.set("job.name=abc", "z"); }),
            "zr::Configuration::set: 'job.name=abc' is not a dotted path of bare keys such as train.steps");
  EXPECT_EQ(user_error_of([&] {
              config.add_group({"*"}, {{"lr_scale = 3 #", 0.5}});
            }),
            "zr::Configuration::add_group: 'lr_scale = 3 #' is not a bare key such as weight_decay");
  EXPECT_TRUE(config.values().empty()) << "a rejected call has no effect";
  EXPECT_EQ(config.toml(), "");
}

void fails() { throw zr::EnvironmentError("the data is missing"); }

TEST(GuardedTest, CallsFunctionsNamedAndConstantCallables) {
  int calls = 0;
  auto named = [&]() mutable { ++calls; };
  const auto constant = [&] { return ++calls; };
  EXPECT_EQ(zr::guarded(named), 0);
  EXPECT_EQ(zr::guarded(constant), 0);
  EXPECT_EQ(zr::guarded([&] { ++calls; }), 0);
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(zr::guarded(fails), 3);
}

}  // namespace
