// The engine finds weights that differ between ranks, within a bounded number of steps and at a bounded cost.
#include <gmock/gmock.h>

#include "support/engine_test.hpp"
#include "zr/parameters.hpp"

namespace {

using namespace engine_tests;

using testing::HasSubstr;

class WeightDigestTest : public EngineTest {
 protected:
  // The job must end with exit code 2 and report `message`.
  void expect_found(int ranks, const zr::test::RankBody& body, const std::string& overrides,
                    const std::string& message) {
    const Result result = run(ranks, body, overrides);
    EXPECT_EQ(result.code, 2) << body.name() << " " << overrides << "\n" << result.output;
    EXPECT_THAT(result.output, HasSubstr("weights differ between ranks: in " + message)) << overrides;
    EXPECT_THAT(result.output, HasSubstr("; write the same values to a weight on all ranks (write on every rank, "
                                         "from generators with the same seed), or use engine.set()"));
  }
  const std::vector<std::string> replicated_{"strategy=zero0 communicator.share_weights=false",
                                             "strategy=zero1 communicator.share_weights=false",
                                             "strategy=zero2 communicator.share_weights=false"};
  const std::string sharded_ = "strategy=zero3 communicator.share_weights=false";
};

bool last_rank(const Run& run) { return run.engine->rank() == run.engine->world() - 1; }

// After every step, rank 0 or every rank clamps a weight.
void clamp(Run& run, bool everywhere) {
  run.build();
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    if (everywhere || run.engine->rank() == 0) run.model->named_parameters()["twice.weight"].clamp_(-1e-4, 1e-4);
  }
}

const zr::test::RankBodyOf<Run> clamp_rank_zero("clamp_rank_zero", [](Run& run) { clamp(run, false); });

TEST_F(WeightDigestTest, DetectsAWriteOnOneRankInTheNextStep) {
  for (const std::string& how : replicated_)
    expect_found(2, clamp_rank_zero, how,
                 "'twice.weight', elements 0 to 1295, rank 1 has different values than rank 0 (found in step 2)");
  expect_found(3, clamp_rank_zero, replicated_[1],
               "'twice.weight', elements 0 to 1295, rank 0 has different values than ranks 1 and 2 (found in step 2)");
}

// zero3 keeps gathered weights, which one rank can write to without communication. It stores only its own shard of
// them.
TEST_F(WeightDigestTest, DetectsAWriteOnOneRankToAWeightThatIsStillGathered) {
  expect_found(2, clamp_rank_zero, sharded_,
               "'twice.weight', elements 0 to 1295, rank 0 wrote values that rank 1 did not write (found in step 2)");
  expect_found(3, clamp_rank_zero, sharded_,
               "'twice.weight', elements 0 to 1295, rank 0 wrote values that ranks 1 and 2 did not write (found in "
               "step 2)");
}

// Every rank fills a weight from its own random generator.
RANK_BODY(draw_per_rank, Run) {
  run.build();
  run.micro_step();
  {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(static_cast<uint64_t>(run.engine->rank()));
    run.model->named_parameters()["large.weight"].normal_();
  }
  run.micro_step();
}

TEST_F(WeightDigestTest, DetectsValuesDrawnPerRankInTheNextStep) {
  for (const std::string& how : replicated_)
    expect_found(2, draw_per_rank, how,
                 "'large.weight', elements 0 to 20771, rank 1 has different values than rank 0 (found in step 2)");
  expect_found(2, draw_per_rank, sharded_,
               "'large.weight', elements 0 to 20771, rank 1 wrote different values than rank 0 (found in step 2)");
}

// Both ranks enter a zr::gather scope, in which the last one changes an element of the other's shard.
RANK_BODY(write_in_scope, Run) {
  run.build();
  run.micro_step();
  torch::Tensor weight = run.model->named_parameters()["twice.weight"];
  {
    const auto scope = zr::gather(weight);
    if (last_rank(run)) weight.data_ptr<float>()[21] += 1;
  }
  run.engine->save(run.program.text("checkpoint.dir"));
}

TEST_F(WeightDigestTest, DetectsAWriteOnOneRankInAScopeBeforeACheckpoint) {
  expect_found(2, write_in_scope, sharded_ + " checkpoint.dir=" + (folder_ / "checkpoints").string(),
               "'twice.weight', elements 0 to 1295, rank 1 wrote different values than rank 0 (found in step 1)");
}

// Rank 0 changes a weight alone. Later it has been released and is gathered again, from shards of which only that of
// rank 0 has changed, in a scope that only reads.
RANK_BODY(write_evaluate_and_read, Run) {
  run.build();
  run.micro_step();
  run.micro_step();
  const torch::NoGradGuard no_grad;
  if (run.engine->rank() == 0) run.model->named_parameters()["twice.weight"].fill_(0.5);
  {
    const zr::Engine::Evaluation evaluation(*run.engine);
    run.model->loss(0, 0);
  }
  { const auto scope = zr::gather(run.model->parameters()); }
  run.engine->save(run.program.text("checkpoint.dir"));
}

TEST_F(WeightDigestTest, LaterReadsDoNotHideAWriteOnOneRank) {
  expect_found(2, write_evaluate_and_read,
               sharded_ + " strategy.zero3.max_live_bytes=16KiB checkpoint.dir=" + (folder_ / "checkpoints").string(),
               "'twice.weight', elements 0 to 1295, rank ");
}

void clamp_last(Run& run, const std::function<void()>& then) {
  run.build();
  run.micro_step();
  run.micro_step();
  if (last_rank(run)) {
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.weight"].clamp_(-1e-4, 1e-4);
  }
  then();
}
const zr::test::RankBodyOf<Run> clamp_and_refresh("clamp_and_refresh", [](Run& run) {
  clamp_last(run, [&] {
    run.model->register_parameter("extra", torch::zeros({3}));
    run.engine->refresh();
  });
});
const zr::test::RankBodyOf<Run> clamp_and_release("clamp_and_release",
                                                  [](Run& run) { clamp_last(run, [&] { run.engine->release(); }); });

const zr::test::RankBodyOf<Run> clamp_and_get("clamp_and_get", [](Run& run) {
  clamp_last(run, [&] { run.engine->get("twice.weight"); });
});
const zr::test::RankBodyOf<Run> clamp_and_evaluate("clamp_and_evaluate", [](Run& run) {
  clamp_last(run, [&] { const zr::Engine::Evaluation evaluation(*run.engine); });
});

TEST_F(WeightDigestTest, EveryUseOfWeightsDetectsAWriteOnOneRank) {
  for (const auto* body : {&clamp_and_refresh, &clamp_and_release, &clamp_and_get, &clamp_and_evaluate}) {
    expect_found(2, *body, sharded_,
                 "'twice.weight', elements 0 to 1295, rank 1 wrote values that rank 0 did not write (found in step 2)");
    expect_found(2, *body, replicated_[1],
                 "'twice.weight', elements 0 to 1295, rank 1 has different values than rank 0");
  }
}

// A weight that is not gathered any more is written to by one rank only, which waits for the others.
RANK_BODY(write_on_one_rank_after_backward, Run) {
  run.build();
  while (run.engine->step_index() < 2) run.micro_step();
  run.engine->backward(run.model->loss(2, 0));
  if (last_rank(run)) {
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.weight"].mul_(0.5);
  }
  run.engine->backward(run.model->loss(2, 1));
}

TEST_F(WeightDigestTest, AWriteOnOneRankThatNeedsAGatherIsNamedAsAWrite) {
  const Result result = run(2, write_on_one_rank_after_backward, sharded_ + " strategy.zero3.max_reuse_bytes=0");
  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_THAT(result.output, HasSubstr("in an in-place write to 'twice.weight'"));
  EXPECT_THAT(result.output,
              HasSubstr("in-place writes to parameters are collective: make the same write on all ranks"));
}

// A frozen weight, and one that the checkpoint does not have.
RANK_BODY(draw_frozen, Run) {
  run.build();
  {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(static_cast<uint64_t>(run.engine->rank()));
    run.model->named_parameters()["frozen.weight"].normal_();
  }
  run.train();
}
RANK_BODY(draw_what_is_not_loaded, Run) {
  run.build();
  run.micro_step();
  run.micro_step();
  const std::string folder = run.program.text("checkpoint.dir");
  run.engine->save(folder);
  run.model->register_parameter("extra", torch::zeros({50, 50}));
  run.engine->refresh();
  {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(static_cast<uint64_t>(run.engine->rank()));
    run.model->named_parameters()["extra"].normal_();
    run.model->named_parameters()["twice.weight"].normal_();
  }
  run.engine->load(folder, {.strict = false});
  run.engine->save(folder);
}

TEST_F(WeightDigestTest, DetectsDifferentWritesToWeightsThatAreFrozenOrNotLoaded) {
  expect_found(2, draw_frozen, sharded_,
               "'frozen.weight', elements 0 to 1295, rank 1 wrote different values than rank 0 (found in step 1)");
  for (const std::string& how : {sharded_, replicated_[0]})
    expect_found(2, draw_what_is_not_loaded, how + " checkpoint.dir=" + (folder_ / "checkpoints").string(),
                 "'extra', elements 0 to ");
}

// Weights drawn per rank that engine.set() or a checkpoint then replaces.
RANK_BODY(draw_and_replace, Run) {
  run.build();
  run.micro_step();
  const std::string folder = run.program.text("checkpoint.dir");
  run.engine->save(folder);
  const auto draw = [&](const char* name) {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(static_cast<uint64_t>(run.engine->rank()));
    run.model->named_parameters()[name].normal_();
  };
  draw("twice.weight");
  run.engine->set("twice.weight", zr::TensorKind::value, torch::ones({36, 36}));
  run.micro_step();
  draw("twice.weight");
  draw("large.weight");
  run.engine->load(folder);
  run.micro_step();
  std::cout << "trained to step " << run.engine->step_index() << std::endl;
}

TEST_F(WeightDigestTest, AcceptsDifferentWritesThatAreReplacedBeforeTheNextStep) {
  const std::string folder = (folder_ / "checkpoints").string();
  const Result result = run(2, draw_and_replace, sharded_ + " checkpoint.dir=" + folder);
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("trained to step 2"));
}

// The last rank changes one element through its address; libtorch cannot detect this write.
void write_element(Run& run, const std::string& parameter) {
  run.build();
  run.micro_step();
  if (last_rank(run)) run.model->named_parameters()[parameter].data_ptr<float>()[21] += 1;
  run.train();
}

const zr::test::RankBodyOf<Run> write_by_address("write_by_address",
                                                 [](Run& run) { write_element(run, "embedding.weight"); });

const zr::test::RankBodyOf<Run> write_frozen("write_frozen", [](Run& run) { write_element(run, "frozen.weight"); });

// One element written by address, which libtorch does not notice, in a trained weight and in a frozen one.
TEST_F(WeightDigestTest, ComparesEveryReplicatedWeightWithinItsCycle) {
  expect_found(2, write_by_address, "train.steps=110 " + replicated_[0], "'embedding.weight', element 21, ");
  for (const std::string& how : replicated_)
    expect_found(2, write_frozen, "train.steps=110 " + how, "'frozen.weight', element 21, ");
}

const zr::test::RankBodyOf<Run> clamp_everywhere("clamp_everywhere", [](Run& run) { clamp(run, true); });

TEST_F(WeightDigestTest, AcceptsIdenticalWritesOnAllRanks) {
  for (const std::string& how : {replicated_[0], replicated_[1], replicated_[2], sharded_}) {
    const Result result = run(2, clamp_everywhere, "train.steps=8 " + how);
    EXPECT_EQ(result.code, 0) << how << "\n" << result.output;
  }
}

// After every step, rank 0 (or no rank) writes to a weight without changing its values.
void write_nothing(Run& run, bool writes) {
  run.build();
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    if (writes && run.engine->rank() == 0) run.model->named_parameters()["twice.weight"].clamp_(-1e9, 1e9);
  }
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) std::cout << "hash " << hash << std::endl;
}

const zr::test::RankBodyOf<Run> writes_nothing("writes_nothing", [](Run& run) { write_nothing(run, true); });

const zr::test::RankBodyOf<Run> trains_alike("trains_alike", [](Run& run) { write_nothing(run, false); });

// A write that changes no value affects neither later digests nor the result.
TEST_F(WeightDigestTest, AcceptsWritesOfOneRankThatChangeNothing) {
  for (const std::string& how : replicated_) {
    const Result writes = run(2, writes_nothing, "train.steps=12 " + how);
    EXPECT_EQ(writes.code, 0) << how << "\n" << writes.output;
    EXPECT_THAT(writes.output, HasSubstr("hash ")) << how;
    EXPECT_EQ(writes.output, run(2, trains_alike, "train.steps=12 " + how).output) << how;
  }
}

TEST_F(WeightDigestTest, DigestsAtMostOnePercentOfTheOptimizersBytes) {
  for (const std::string& how : replicated_) {
    ASSERT_EQ(run(2, trains, "train.steps=110 " + how).code, 0) << how;
    const auto digest = summary()["weight_digest"];
    const int64_t bytes = digest["bytes"], optimizer = digest["optimizer_bytes"];
    EXPECT_GT(bytes, 0) << how;
    EXPECT_LE(100 * bytes, optimizer) << how;
    EXPECT_GE(digest["cycles"].get<int64_t>(), 1) << how << ": a cycle takes at most 50 steps per rank";
  }
  std::vector<std::string> without_own_weights{"strategy=zero3 communicator.share_weights=false"};
  if (!zr::test::jobs_run_on_hosts()) without_own_weights.emplace_back("strategy=zero1");  // shared by all ranks
  for (const std::string& how : without_own_weights) {
    ASSERT_EQ(run(2, trains, "train.steps=3 " + how).code, 0);
    EXPECT_EQ(summary()["weight_digest"]["bytes"], 0) << how << ": no rank has weights of its own";
  }
}

RANK_BODY(set_per_rank, Run) {
  run.build();
  run.engine->set("scalar", zr::TensorKind::value, torch::full({}, run.engine->rank()));
}

// From the second step on, the last rank's loss is NaN.
RANK_BODY(skips, Run) {
  run.build();
  while (!run.engine->done()) {
    const bool nan_loss = run.engine->step_index() >= 1 && last_rank(run);
    const auto loss = run.model->loss(run.engine->step_index(), run.engine->micro_index());
    run.engine->backward(nan_loss ? loss * std::numeric_limits<float>::quiet_NaN() : loss);
    run.engine->step();
  }
}

// After every step, reads weights in a zr::gather scope and undoes a write. The checkpoint of the step must not change.
RANK_BODY(write_back, Run) {
  run.build();
  const torch::Tensor weight = run.model->named_parameters()["twice.weight"];
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    {
      const auto scope = zr::gather(run.model->parameters());
      EXPECT_GT(weight.norm().item<float>(), 0) << "the weights can be read";
    }
    const torch::Tensor own = weight.clone();
    weight.zero_();
    weight.copy_(own);
  }
  std::cout << "trained to step " << run.engine->step_index() << std::endl;
}

// The program writes to a weight and then saves, as the log advises, in addition to checkpoint.every.
RANK_BODY(clamp_and_save, Run) {
  run.build();
  while (!run.engine->done()) {
    run.micro_step();
    const torch::NoGradGuard no_grad;
    run.model->named_parameters()["twice.weight"].clamp_(-0.01, 0.01);
    run.engine->save(run.program.text("checkpoint.dir"));
  }
  std::cout << "trained to step " << run.engine->step_index() << std::endl;
}

TEST_F(WeightDigestTest, ReportsMistakes) { check_messages("weight_errors.txt", 3); }

}  // namespace
