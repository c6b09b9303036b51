// zr::MicroBatchSampler: which samples each micro-batch gets.
#include "zr/sampler.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/data.h>

#include <thread>

#include "support/engine_test.hpp"

namespace {

using namespace engine_tests;

constexpr std::size_t kSize = 10;  // not a multiple of the global batch: micro-batches reach into the next epoch

class MicroBatchSamplerTest : public EngineTest {
 protected:
  // The sorted samples of each step, over all ranks.
  std::vector<std::string> steps_of(int ranks, const zr::test::RankBody& body, const std::string& overrides) {
    const Result done = run(ranks, body, overrides);
    EXPECT_EQ(done.code, 0) << done.output;
    std::vector<std::string> steps;
    std::istringstream lines(done.output);
    for (std::string line; std::getline(lines, line);)
      if (const auto at = line.find("samples of step "); at != line.npos) steps.push_back(line.substr(at));
    return steps;
  }
};

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  torch::data::Example<> get(std::size_t index) override {
    return {torch::tensor(static_cast<int64_t>(index)), torch::Tensor(torch::zeros({}))};
  }
  std::optional<std::size_t> size() const override { return kSize; }
};

// Trains with the data loader, up to `steps`; rank 0 prints the samples of each step.
void train_and_print(Run& run, int64_t steps) {
  auto loader = torch::data::make_data_loader(
      Numbers().map(torch::data::transforms::Stack<>()), zr::MicroBatchSampler(*run.engine, kSize),
      torch::data::DataLoaderOptions(static_cast<std::size_t>(run.engine->micro_batch())).workers(1));
  std::vector<torch::Tensor> step;
  for (const torch::data::Example<>& batch : *loader) {
    const torch::Tensor all = run.engine->all_gather(batch.data).flatten();
    step.push_back(all);
    run.engine->backward(run.model->loss(run.engine->step_index(), run.engine->micro_index()));
    if (!run.engine->step()) continue;
    if (run.engine->rank() == 0) {
      const torch::Tensor sorted = std::get<0>(torch::cat(step).sort());
      std::ostringstream line;
      line << "samples of step " << run.engine->step_index();
      for (int64_t i = 0; i < sorted.numel(); ++i) line << " " << sorted[i].item<int64_t>();
      std::cout << line.str() + "\n" << std::flush;
    }
    step.clear();
    if (run.engine->done() || run.engine->step_index() == steps) break;
  }
}

RANK_BODY(trains_on_samples, Run) {
  run.build();
  train_and_print(run, run.engine->steps());
}

RANK_BODY(resumes_on_samples, Run) {
  run.build();
  train_and_print(run, 2);
  run.engine->save(run.program.text("job.runs") + "-saved");
  run.engine.reset();
  run.build();
  run.engine->load(run.program.text("job.runs") + "-saved");
  train_and_print(run, run.engine->steps());
}

TEST_F(MicroBatchSamplerTest, StepsReadTheSameSamplesForAnyNumberOfRanks) {
  const std::string batch = "train.steps=5 train.micro_batch=2 train.gradient_accumulation=";
  const std::vector<std::string> expected = steps_of(1, trains_on_samples, batch + "4");
  ASSERT_EQ(expected.size(), 5u);
  EXPECT_EQ(steps_of(2, trains_on_samples, batch + "2"), expected);
  EXPECT_EQ(steps_of(4, trains_on_samples, batch + "1 strategy=zero2"), expected);
  EXPECT_EQ(steps_of(2, resumes_on_samples, batch + "2"), expected);
  EXPECT_NE(steps_of(2, trains_on_samples, batch + "2 train.seed=8"), expected);
}

MULTIRANK_TEST(MicroBatchSamplerTest, EveryEpochHasEverySampleOnce, {1, 2}, {"train.micro_batch=1"}) {
  run.build();
  zr::MicroBatchSampler sampler(*run.engine, 6);
  std::vector<int64_t> order;
  for (int64_t micro = 0; micro < 12 / run.engine->world(); ++micro)
    order.push_back(static_cast<int64_t>(sampler.next(1)->at(0)));
  const torch::Tensor all = run.engine->all_gather(torch::tensor(order)).t().flatten();
  for (const int64_t epoch : {0, 1})
    EXPECT_TRUE(torch::equal(std::get<0>(all.narrow(0, epoch * 6, 6).sort()), torch::arange(6))) << all;
  EXPECT_FALSE(torch::equal(all.narrow(0, 0, 6), all.narrow(0, 6, 6))) << "epochs are shuffled differently";
}

MULTIRANK_TEST(MicroBatchSamplerTest, KeepsItsDatasetIfResetRejectsAnEmptyOne, {2}) {
  run.build();
  const auto batch = static_cast<std::size_t>(run.engine->micro_batch());
  zr::MicroBatchSampler sampler(*run.engine, 20), same(*run.engine, 20);
  EXPECT_EQ(sampler.next(batch), same.next(batch));
  EXPECT_THROW(sampler.reset(0), zr::UserError);
  EXPECT_EQ(sampler.next(batch), same.next(batch));
  sampler.reset(7);
  const std::optional<std::vector<std::size_t>> samples = sampler.next(batch);
  ASSERT_TRUE(samples);
  for (const std::size_t sample : *samples) EXPECT_LT(sample, 7u);
}

// The formula of docs/numerics.md.
uint64_t seed_of_generator(uint64_t x, uint64_t key) {
  for (const uint64_t y : {key, ~uint64_t{0}}) {
    x += 0x9e3779b97f4a7c15 + y;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
  }
  return x;
}

MULTIRANK_TEST(MicroBatchSamplerTest, GeneratorsOfLoadersDoNotChangeTheNumbersOfTheModel, {1, 2}) {
  run.build();
  const auto state = [] { return at::detail::getDefaultCPUGenerator().get_state(); };
  for (const int64_t key : {0, 1, -1, 1000000}) {
    const torch::Tensor before = state();
    torch::Tensor drawn;
    std::thread([&] { drawn = torch::randn({5}, run.engine->generator(key)); }).join();
    EXPECT_TRUE(torch::equal(state(), before));
    const auto seed = seed_of_generator(static_cast<uint64_t>(run.engine->seed()), static_cast<uint64_t>(key));
    EXPECT_TRUE(torch::equal(drawn, torch::randn({5}, at::make_generator<at::CPUGeneratorImpl>(seed)))) << key;
    run.micro_step();
  }
}

MULTIRANK_TEST(MicroBatchSamplerTest, RejectsAnEmptyDatasetAndAnotherBatchSize, {1}) {
  run.build();
  try {
    zr::MicroBatchSampler sampler(*run.engine, 0);
    ADD_FAILURE();
  } catch (const zr::UserError& error) {
    EXPECT_STREQ(error.what(), "zr::MicroBatchSampler: the dataset is empty; pass its number of samples");
  }
  zr::MicroBatchSampler sampler(*run.engine, 5);
  try {
    sampler.next(4);
    ADD_FAILURE();
  } catch (const zr::UserError& error) {
    EXPECT_STREQ(error.what(),
                 "zr::MicroBatchSampler: the data loader asks for 4 samples, but train.micro_batch is 3; give the data "
                 "loader the batch size engine.micro_batch()");
  }
}

}  // namespace
