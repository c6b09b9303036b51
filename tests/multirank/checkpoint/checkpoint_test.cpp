// A resumed run is bit-identical to an uninterrupted run under any strategy and number of ranks.
#include <tuple>

#include "multirank/checkpoint/bodies.hpp"

namespace zr::test {
namespace {

const std::vector<std::string> kStrategies{"zero0", "zero1", "zero2", "zero3"};

const std::vector<int> kWorlds{1, 2, 3, 4, 8};

class CheckpointResumeTest : public CheckpointTest {
 protected:
  // Saves at step 2 under every strategy and number of ranks, then resumes to step 4: every save under every
  // combination, or under every strategy and number of ranks from every strategy and from every number of ranks.
  void check(bool every_combination) {
    const std::string how = "parity.model=everything";
    std::vector<std::tuple<std::string, std::string, int, int>> resumes;  // to, from, ranks then, ranks of the save
    for (std::size_t m = 0; m < kWorlds.size(); ++m)
      for (std::size_t to = 0; to < kStrategies.size(); ++to)
        for (std::size_t from = 0; from < kStrategies.size(); ++from)
          for (std::size_t n = 0; n < kWorlds.size(); ++n)
            if (every_combination || n == (m + to + from) % kWorlds.size())
              resumes.emplace_back(kStrategies[to], kStrategies[from], kWorlds[m], kWorlds[n]);
    run(1, "job.name=uninterrupted strategy=zero0\n", how);
    const auto uninterrupted = losses("uninterrupted");
    const auto folder = [](const std::string& strategy, int n) {
      return "saved-" + strategy + "-" + std::to_string(n);
    };
    std::map<std::string, std::string> first;
    for (const int n : kWorlds) {
      std::string lines;
      for (const std::string& strategy : kStrategies)
        lines += "job.name=" + folder(strategy, n) + " strategy=" + strategy +
                 " checkpoint.dir=" + folder(strategy, n) + " checkpoint.every=2 train.steps=2\n";
      run(n, lines, how);
      for (const std::string& strategy : kStrategies) {
        const auto all = contents(host::checkpoint::find_checkpoint(scratch_.path(folder(strategy, n))));
        if (first.empty()) first = all;
        EXPECT_EQ(all == first, true) << strategy << " on " << n << " ranks saves different tensors";
      }
    }
    const auto name_of = [&](const auto& resume) {
      const auto& [to, from, m, n] = resume;
      return "on-" + to + "-" + std::to_string(m) + "-" + folder(from, n);
    };
    for (const int world : kWorlds) {
      std::string lines;
      for (const auto& resume : resumes)
        if (const auto& [to, from, m, n] = resume; m == world)
          lines += "job.name=" + name_of(resume) + " strategy=" + to +
                   " checkpoint.resume=true checkpoint.dir=" + folder(from, n) + "\n";
      run(world, lines, how);
    }
    const std::map<int64_t, std::string> rest{{3, uninterrupted.at(3)}, {4, uninterrupted.at(4)}};
    for (const auto& resume : resumes) {
      EXPECT_EQ(hash(name_of(resume)), hash("uninterrupted")) << name_of(resume);
      EXPECT_EQ(losses(name_of(resume)), rest) << name_of(resume);
    }
  }
};

TEST_F(CheckpointResumeTest, IsBitIdenticalUnderAnyStrategyAndWorldSize) { check(false); }

TEST_F(CheckpointResumeTest, SLOW_IsBitIdenticalInEveryCombination) { check(true); }

// Dropout, recurrent models, 16-bit types, a changing loss scale, weights that are not shared, plain SGD, a schedule.
TEST_F(CheckpointTest, ResumesBitIdenticallyAcrossModelsDtypesAndSchedules) {
  const std::vector<std::string> jobs{
      "parity.model=dropout strategy=zero1",
      "parity.model=recurrent strategy=zero3",
      "parity.model=everything strategy=zero3 communicator.share_weights=false train.dtype=bf16",
      "parity.model=everything strategy=zero1 communicator.share_weights=false",
      "parity.model=dropout strategy=zero0 train.dtype=bf16 optimizer=sgd",
      "parity.model=everything strategy=zero2 train.dtype=fp16 fp16.initial_scale_power=12 fp16.loss_scale_window=2",
      "parity.model=everything strategy=zero1 train.dtype=fp16 parity.overflows=true fp16.hysteresis=2 "
      "fp16.initial_scale_power=10",
      "parity.model=everything strategy=zero2 schedule.use=linear schedule.linear.decay_until=6 "
      "schedule.linear.warmup=3 schedule.linear.warmup_from=1 checkpoint.async=true"};
  std::string uninterrupted, stopped, resumed;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::string at = " checkpoint.dir=c" + std::to_string(i) + " ", n = std::to_string(i) + "\n";
    uninterrupted += jobs[i] + " job.name=uninterrupted" + n;
    stopped += jobs[i] + at + "checkpoint.every=3 train.steps=3 job.name=stopped" + n;
    resumed += jobs[i] + at + "checkpoint.resume=true job.name=stopped" + n;
  }
  run(2, uninterrupted, "train.steps=6");
  run(2, stopped);
  run(3, resumed, "train.steps=6");
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::string n = std::to_string(i);
    EXPECT_EQ(hash("stopped" + n), hash("uninterrupted" + n)) << jobs[i];
    EXPECT_EQ(losses("stopped" + n), losses("uninterrupted" + n)) << jobs[i];
    EXPECT_EQ(losses("stopped" + n).size(), 6u) << "the resumed run must keep the rows from before the stop";
  }
}

// With gradients.reduce = "last_micro_step" the result depends on the number of ranks, but not on a stop.
TEST_F(CheckpointTest, ResumesBitIdenticallyWithLastMicroStepReduction) {
  const std::string how = "parity.model=everything strategy=zero2 train.dtype=bf16 gradients.reduce=last_micro_step ";
  run(2, "job.name=uninterrupted\njob.name=stopped checkpoint.dir=c checkpoint.every=3 train.steps=3\n",
      how + "train.steps=6");
  run(2, "job.name=stopped checkpoint.dir=c checkpoint.resume=true\n", how + "train.steps=6");
  EXPECT_EQ(hash("stopped"), hash("uninterrupted"));
  EXPECT_EQ(losses("stopped"), losses("uninterrupted"));
}

// An epoch is two steps long: step 3 reads the same data as step 1.
RANK_BODY(trains_epochs, Run) {
  run.build();
  while (!run.engine->done()) {
    run.engine->backward(run.model->loss(run.engine->step_index() % 2, run.engine->micro_index()));
    run.engine->step();
  }
}

TEST_F(CheckpointTest, ResumesBitIdenticallyInSecondEpoch) {
  const std::string how = "parity.model=dropout train.steps=";
  ASSERT_EQ(run_pair(trains_epochs, how + "7 job.name=uninterrupted").code, 0);
  ASSERT_EQ(run_pair(trains_epochs, how + "3 job.name=stopped checkpoint.dir=c checkpoint.every=3").code, 0);
  const Outcome rest = run_pair(trains_epochs, how + "7 job.name=stopped checkpoint.dir=c checkpoint.resume=true");
  ASSERT_EQ(rest.code, 0) << rest.output;
  EXPECT_EQ(hash("stopped"), hash("uninterrupted"));
  EXPECT_EQ(losses("stopped"), losses("uninterrupted"));
}

TEST_F(CheckpointTest, KeepsConfiguredNumberOfCheckpoints) {
  run(2, "job.name=a checkpoint.dir=c checkpoint.every=1 checkpoint.keep=2\n", "parity.model=tiny");
  EXPECT_EQ(names_in("c"), (std::vector<std::string>{"lock", "step-00000003", "step-00000004"}));
  EXPECT_EQ(summary("a").at("checkpoints").dump(), R"({"failed":0,"last_step":4,"saved":4})");
  const Outcome verified = shell(zeroth_bin() + "verify c");
  EXPECT_EQ(verified.code, 0) << verified.output;
  EXPECT_NE(verified.output.find("step-00000004: intact, step 4, "), std::string::npos) << verified.output;
}

TEST_F(CheckpointTest, LoadThenSavePreservesAllTensors) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    run(2, "job.name=a checkpoint.dir=" + dtype + " checkpoint.every=2 train.steps=2 train.dtype=" + dtype + "\n",
        "parity.model=everything strategy=zero3");
    const Outcome again = run_pair(resaves, "parity.model=everything strategy=zero1 train.dtype=" + dtype, dtype);
    ASSERT_EQ(again.code, 0) << again.output;
    const auto before = contents(scratch_.path(dtype + "/step-00000002"));
    EXPECT_TRUE(before == contents(scratch_.path(dtype + "-again/step-00000002"))) << dtype;
    EXPECT_GT(before.size(), 40u);
  }
}

RANK_BODY(saves_midway, Run) {
  run.build();
  run.engine->backward(run.model->loss(0, run.engine->micro_index()));
  const std::string midway = thrown_by([&] { run.engine->save(checkpoint_folder()); });
  run.engine->step();  // ends the first of two micro-steps
  say(run, midway + "\n" + thrown_by([&] { run.engine->save(checkpoint_folder()); }));
  run.micro_step();
  say(run, run.engine->save(checkpoint_folder()));
}

TEST_F(CheckpointTest, RejectsSaveBetweenMicroBatches) {
  const Outcome done = run_pair(saves_midway, "train.gradient_accumulation=2");
  EXPECT_EQ(done.code, 0) << done.output;
  const std::string text =
      "engine.save() was called between engine.backward() and the engine.step() that ends its step: gradients are "
      "not saved; call engine.save() after engine.step()\n";
  EXPECT_EQ(done.output, text + text + scratch_.path("c/step-00000001") + "\n");
}

TEST_F(CheckpointTest, SLOW_UsesNoMoreMemoryThanOneChunkOrOwnShard) {
  run(2,
      "job.name=plain\njob.name=async checkpoint.dir=a checkpoint.every=1 checkpoint.async=true\n"
      "job.name=sync checkpoint.dir=s checkpoint.every=2\n",
      "parity.model=ample strategy=zero3 communicator.share_weights=false");
  run(2, "job.name=resumed checkpoint.dir=s checkpoint.resume=true train.steps=6\n",
      "parity.model=ample strategy=zero3 communicator.share_weights=false");
  const auto peak = [&](const std::string& name, const char* tier, const char* kind) {
    const Json memory = summary(name).at("memory");
    return memory.contains(tier) && memory[tier].contains(kind) ? memory[tier][kind]["peak"].get<int64_t>() : 0;
  };
  for (const std::string kind : {"weights", "gradients", "optimizer", "buckets", "all_gather", "other"})
    for (const std::string name : {"async", "sync", "resumed"})
      EXPECT_EQ(peak(name, "device", kind.c_str()), peak("plain", "device", kind.c_str())) << name << " " << kind;
  EXPECT_EQ(peak("sync", "host", "snapshot"), 0);
  const Json snapshot = summary("async").at("memory").at("host").at("snapshot");
  const double planned = snapshot["planned"], measured = snapshot["peak"];
  const double shard =
      static_cast<double>(peak("plain", "device", "optimizer")) * 3 / 2;  // fp32 weights plus two optimizer states
  EXPECT_NEAR(measured, planned, 0.02 * planned);
  EXPECT_NEAR(planned, shard, 0.02 * shard) << "the snapshot must hold one copy of the rank's own shard";
  const int64_t extra = peak("resumed", "host", "other") - peak("plain", "host", "other");
  EXPECT_GT(extra, 0);
  EXPECT_LE(extra, int64_t{64} << 20) << "loading must use at most one chunk";
}

}  // namespace
}  // namespace zr::test
