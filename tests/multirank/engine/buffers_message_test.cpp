// Errors about buffers, and buffers that the module replaces.
#include <torch/script.h>

#include <fstream>

#include "multirank/engine/buffers_model.hpp"
#include "support/engine_test.hpp"

namespace engine_tests {
namespace {

using buffers_tests::Job;
using buffers_tests::Running;

// A buffer that is empty at first and grows with every forward.
RANK_BODY(script_grows, Run) {
  torch::jit::Module module("Script");
  module.register_parameter("weight", torch::linspace(-1, 1, 6).set_requires_grad(true), false);
  module.register_buffer("seen", torch::zeros({0}));
  module.define(
      "def forward(self, x):\n"
      "  self.seen = torch.cat([self.seen, x.mean(0)])\n"
      "  return (x * self.weight).square().mean()\n");
  zr::Engine engine(run.program, module);
  engine.backward(module.forward({torch::ones({3, 6})}).toTensor());
}

RANK_BODY(retyped, Run) {
  Job job(run, {});
  job.step();
  job.model.level.set_data(job.model.level.to(torch::kHalf));
  job.step();
}

// Each of these calls must throw.
RANK_BODY(no_such_buffer, Run) {
  Job job(run, {});
  job.engine.buffer("levle");
}

RANK_BODY(other_shape, Run) {
  Job job(run, {});
  job.engine.set_buffer("level", torch::zeros({2}));
}

RANK_BODY(other_values, Run) {
  Job job(run, {});
  job.engine.set_buffer("level", torch::full({Running::kHidden}, job.engine.rank()));
}

RANK_BODY(set_in_evaluation, Run) {
  Job job(run, {});
  const zr::Engine::Evaluation evaluation(job.engine);
  job.engine.set_buffer("level", torch::zeros({Running::kHidden}));
}

// The module replaces a buffer with a smaller one, or registers another one, after the engine is created.
void replace(Job& job) { job.model.replace_part(torch::full({1}, 3.0 + job.engine.rank())); }

RANK_BODY(replaced_read, Run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  job.engine.buffer("part.level");
}

RANK_BODY(replaced_set, Run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  job.engine.set_buffer("part.level", torch::zeros({1}));
}

RANK_BODY(replaced_saved, Run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  job.engine.save(run.program.text("job.runs") + "/none");
}

RANK_BODY(replaced_evaluated, Run) {
  Job job(run, {}, torch::ones({1000}));
  replace(job);
  const zr::Engine::Evaluation evaluation(job.engine);
}

RANK_BODY(added_read, Run) {
  Job job(run, {});
  job.model.register_buffer("later", torch::zeros({2}));
  job.engine.buffer("later");
}

RANK_BODY(replaced_differently, Run) {
  Job job(run, {}, torch::ones({1000}));
  if (job.engine.rank() == 0) replace(job);
  job.engine.refresh();
}

RANK_BODY(resumes, Run) { Job job(run, {"checkpoint.resume=true"}); }

TEST_F(EngineTest, ReportsBufferAndResumeErrors) { check_messages("buffer_errors.txt", 4); }

// refresh() picks up the module's current buffers with rank 0's values; checkpoints then contain them.
RANK_BODY(replaced_and_refreshed, Run) {
  Job job(run, {"train.steps=6"}, torch::ones({1000}));
  job.step();
  replace(job);
  job.engine.refresh();
  EXPECT_TRUE(job.model.part_level.eq(3).all().item<bool>()) << "a new buffer has rank 0's values";
  EXPECT_TRUE(same(job.engine.buffer("part.level"), torch::full({1}, 3.0))) << "buffer() returns the new buffer";
  job.engine.set_buffer("part.level", torch::full({1}, 4.0));
  const std::string saved = job.engine.save(run.program.text("job.runs") + "/refreshed");
  job.engine.set_buffer("part.level", torch::full({1}, 5.0));
  job.engine.load(saved);
  EXPECT_TRUE(job.model.part_level.eq(4).all().item<bool>()) << "the checkpoint contains the new buffer";
  job.step();
}

// Only rank 0 adds a parameter that the engine cannot train: refresh() throws on all ranks and changes nothing.
RANK_BODY(refresh_fails_on_one_rank, Run) {
  Job job(run, {"train.steps=6"});
  job.step();
  if (job.engine.rank() == 0)
    job.model.register_module("extra", std::make_shared<torch::nn::Module>())
        ->register_parameter("sparse", torch::zeros({2}).to_sparse(), false);
  std::string error;
  try {
    job.engine.refresh();
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  const bool reported = error.find("parameter 'extra.sparse' is not a dense floating-point tensor") != error.npos;
  const bool names = error.find("engine.refresh() failed on rank 0: ") != error.npos;
  EXPECT_TRUE(reported && names == (job.engine.rank() != 0)) << "every rank reports rank 0's error: " + error;
  if (job.engine.rank() == 0) job.model.unregister_module("extra");
  job.step();
}

// A step without any gradient throws; the next checkpoint still records the previous step as applied.
RANK_BODY(reaches_nothing, Run) {
  Job job(run, {"train.steps=6"});
  job.step();
  const torch::Tensor other = torch::ones({3}, torch::requires_grad());
  bool thrown = false;
  try {
    while (true) {
      job.engine.backward(other.sum());
      if (job.engine.step()) break;
    }
  } catch (const std::exception&) {
    thrown = true;
  }
  EXPECT_TRUE(thrown) << "a loss that depends on no parameter throws";
  std::ifstream in(job.engine.save(run.program.text("job.runs") + "/reached") + "/manifest.json");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const auto at = text.find("last_step_applied");
  EXPECT_TRUE(at != text.npos && text.substr(at, 30).find("true") != std::string::npos)
      << "the checkpoint records that the last step was applied";
}

TEST_F(EngineTest, RefreshPicksUpReplacedBuffersAndFailsOnAllRanks) {
  for (const int ranks : {1, 2})
    for (const auto* body : {&replaced_and_refreshed, &refresh_fails_on_one_rank, &reaches_nothing}) {
      if (ranks == 1 && body == &refresh_fails_on_one_rank) continue;
      const Result result = run(ranks, *body, "strategy=zero1");
      EXPECT_EQ(result.code, 0) << body->name() << " on " << ranks << "\n" << result.output;
    }
}

}  // namespace
}  // namespace engine_tests
