// Updates that begin during backward although the step may still be clipped or skipped: they are kept or undone, and
// the result is that of an update after backward.
#include <gmock/gmock.h>
#include <sys/statvfs.h>

#include <limits>

#include "support/offload_test.hpp"
#include "zr/parameters.hpp"

namespace zr::test {
namespace {

using engine_tests::Run;
using ::testing::HasSubstr;

const std::string kAlways = "offload.speculate=always ";

class SpeculationTest : public OffloadTest {
 protected:
  // The gradient norms of a run, sorted.
  std::vector<double> norms(const std::string& name) const {
    std::vector<double> all;
    std::ifstream rows(scratch_.path("runs/" + name + "/metrics.jsonl"));
    for (std::string row; std::getline(rows, row);) all.push_back(Json::parse(row).at("grad_norm").get<double>());
    std::sort(all.begin(), all.end());
    return all;
  }
  // A checkpoint each so many steps, without those of an earlier run.
  std::string saves(const std::string& name, int every) const {
    fs::remove_all(scratch_.path("c" + name));
    return " checkpoint.dir=c" + name + " checkpoint.keep=0 checkpoint.every=" + std::to_string(every);
  }
  std::map<std::string, std::string> saved(const std::string& name, int step) const {
    return contents(scratch_.path("c" + name + (step < 10 ? "/step-0000000" : "/step-000000") + std::to_string(step)));
  }
};

// Micro-batches have unequal weights.
RANK_BODY(trains_unevenly, Run) {
  run.build();
  while (!run.engine->done()) {
    const int64_t micro = run.engine->micro_index();
    run.engine->backward(run.model->loss(run.engine->step_index(), micro), static_cast<double>(micro % 3 + 1));
    run.engine->step();
  }
}

class SpeculationBits : public SpeculationTest, public ::testing::WithParamInterface<int> {};

TEST_P(SpeculationBits, AreThoseOfTheUpdateAfterBackwardForAnyClipping) {
  constexpr int kSteps = 6;
  for (const std::string how :
       {"train.dtype=fp32", "train.dtype=bf16 parity.model=unused", "train.dtype=bf16 gradients.dtype=bf16",
        "train.dtype=fp16 fp16.loss_scale=256", "train.dtype=bf16 offload.device_fraction=0.4"}) {
    const std::string common = how + " train.gradient_accumulation=2 train.steps=" + std::to_string(kSteps) + " ";
    const RankBody& body = how == "train.dtype=fp32" ? trains_unevenly : engine_tests::trains;
    train(GetParam(), body, "unclipped", common + "strategy=zero1" + states("cpu"));
    const std::vector<double> norms = this->norms("unclipped");
    const std::string sometimes = std::to_string((norms[kSteps / 2 - 1] + norms[kSteps / 2]) / 2);
    for (const std::string& clip : std::vector<std::string>{"1e6", sometimes, "1e-4"}) {
      const std::string clipped = common + " train.gradient_clipping=" + clip + " ";
      const int every = clip == sometimes ? 1 : kSteps;  // checkpoints between updates that are kept and undone
      train(GetParam(), body, "after",
            clipped + "strategy=zero1 offload.overlap=false" + states("nvme") + saves("after", every));
      for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"})
        for (const std::string tier : {"cpu", "nvme"}) {
          const std::string name = strategy + tier;
          train(GetParam(), body, name, clipped + kAlways + "strategy=" + strategy + states(tier) + saves(name, every));
          EXPECT_EQ(hash(name), hash("after")) << clipped << name;
          EXPECT_EQ(losses(name), losses("after")) << clipped << name;
          for (int step = every; step <= kSteps; step += every)
            EXPECT_TRUE(saved(name, step) == saved("after", step))
                << clipped << name << " saves other states, " << step;
          if (name == "zero1nvme" && clip == "1e6") {
            EXPECT_EQ(number(name, "/tiers/nvme/written_bytes"), number("after", "/tiers/nvme/written_bytes"))
                << clipped;
          }
          EXPECT_EQ(number(name, "/overlap/updates_dropped"), 0) << clipped << name;
          const int64_t kept = number(name, "/overlap/updates_early"),
                        undone = number(name, "/overlap/updates_recomputed");
          const bool has_parts = GetParam() == 1 || strategy == "zero0" || how.find("unused") == std::string::npos;
          if (!has_parts) continue;  // rank 0 owns the part that the last micro-batches leave unused
          EXPECT_EQ(kept > 0, clip != "1e-4") << clipped << name;
          EXPECT_EQ(undone > 0, clip != "1e6") << clipped << name;
          EXPECT_EQ(kept + undone, kSteps - 1) << clipped << name << ": the first step records the order";
        }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(SLOW_Ranks, SpeculationBits, ::testing::Values(1, 2, 3), ::testing::PrintToStringParamName());

// In steps 3 and 5 the loss of the last rank is infinite.
RANK_BODY(has_infinite_gradients, Run) {
  run.build();
  while (!run.engine->done()) {
    zr::Engine& engine = *run.engine;
    const bool infinite =
        engine.step_index() % 2 == 0 && engine.step_index() > 0 && engine.rank() + 1 == engine.world();
    const auto loss = run.model->loss(engine.step_index(), engine.micro_index());
    engine.backward(infinite ? loss * std::numeric_limits<float>::infinity() : loss);
    engine.step();
  }
}

TEST_F(SpeculationTest, SLOW_SkippedStepsChangeNothing) {
  // In fp16, at most 12 steps overflow until the loss scale is 256.
  for (const auto& [how, steps] :
       {std::pair{"train.dtype=bf16 ", 6}, std::pair{"train.dtype=fp32 train.gradient_clipping=1e6 ", 6},
        std::pair{"train.dtype=fp16 fp16.initial_scale_power=20 fp16.hysteresis=1 ", 16}}) {
    const std::string common =
        std::string(how) + "train.gradient_accumulation=1 train.steps=" + std::to_string(steps) + " ";
    train(2, has_infinite_gradients, "after", common + "strategy=zero1 offload.overlap=false" + saves("after", steps));
    for (const std::string strategy : {"zero0", "zero3"})
      for (const std::string tier : {"cpu", "nvme"}) {
        const std::string name = strategy + tier;
        train(2, has_infinite_gradients, name,
              common + kAlways + "strategy=" + strategy + states(tier) + saves(name, steps));
        EXPECT_EQ(hash(name), hash("after")) << common << name;
        EXPECT_EQ(losses(name), losses("after")) << common << name;
        EXPECT_TRUE(saved(name, steps) == saved("after", steps)) << common << name << " saves other states";
        EXPECT_EQ(summary(name)["skipped"], summary("after")["skipped"]) << common << name;
        EXPECT_GT(number(name, "/overlap/updates_early"), 0) << common << name;
      }
  }
}

// Between the last backward and step(), the program reads, replaces and writes what the update changes.
RANK_BODY(uses_states_before_the_update, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  const auto parameters = run.model->named_parameters();
  for (int steps = 0; !engine.done(); ++steps) {
    engine.backward(run.model->loss(engine.step_index(), engine.micro_index()));
    const torch::NoGradGuard no_grad;
    switch (steps) {
      case 1: engine.set("twice.bias", zr::TensorKind::value, engine.get("twice.bias") + 1); break;
      case 2:
        engine.set("twice.bias", zr::TensorKind::state, engine.get("twice.bias", zr::TensorKind::state, "exp_avg") * 2,
                   "exp_avg");
        break;
      case 3: parameters["twice.bias"].add_(0.5); break;
      case 4: engine.set_lr(0.002); break;
      case 5: engine.weights_hash(); break;
      case 6: {
        const auto scope = zr::gather(parameters["twice.bias"]);
        parameters["twice.bias"].mul_(2);
      } break;
      case 7: *parameters["twice.bias"].data_ptr<float>() += 1; break;
      case 8: engine.get("twice.bias", zr::TensorKind::state, "exp_avg"); break;
      case 9:
        parameters["twice.bias"].add_(0.5);
        engine.get("twice.bias");
        break;
      case 10: engine.finish(); break;
      default: break;
    }
    engine.step();
  }
}

TEST_F(SpeculationTest, GivesWayToCallsBetweenBackwardAndStep) {
  const std::string common =
      "train.steps=12 train.gradient_accumulation=1 train.gradient_clipping=1e6 strategy=zero1 "
      "communicator.share_weights=false ";
  for (const int ranks : {1, 2}) {
    train(ranks, uses_states_before_the_update, "after", common + "offload.overlap=false" + saves("after", 12));
    for (const std::string tier : {"cpu", "nvme"}) {
      train(ranks, uses_states_before_the_update, tier, common + kAlways + states(tier) + saves(tier, 12));
      EXPECT_EQ(hash(tier), hash("after")) << tier << ranks;
      EXPECT_EQ(losses(tier), losses("after")) << tier << ranks;
      EXPECT_TRUE(saved(tier, 12) == saved("after", 12)) << tier << ranks << " saves other states";
      EXPECT_GE(number(tier, "/overlap/updates_recomputed"), ranks == 1 ? 3 : 0)
          << tier << ": at least after the writes";
    }
  }
}

// The backward of the third step fails before its first gradient, and the program loads the checkpoint of the first
// step: the learning rate is that of the second one again.
RANK_BODY(loads_after_a_failed_backward, Run) {
  run.build();
  zr::Engine& engine = *run.engine;
  engine.set_schedule([](int64_t index) { return 0.01 * static_cast<double>(index + 1); });
  const auto loss = [&] { return run.model->loss(engine.step_index(), engine.micro_index()); };
  std::string first;
  for (bool failed = false; !engine.done();) {
    if (engine.step_index() == 2 && !failed) {
      failed = true;
      torch::Tensor failing = loss();
      failing.register_hook([](const torch::Tensor&) { throw std::runtime_error("on purpose"); });
      EXPECT_ANY_THROW(engine.backward(failing, 2));
      engine.load(first);
    }
    engine.backward(loss());
    engine.step();
    if (engine.step_index() == 1) first = engine.save("first");
  }
}

TEST_F(SpeculationTest, BeginsAgainAfterALoad) {
  const std::string common = "strategy=zero2 train.steps=4 train.gradient_accumulation=1 train.gradient_clipping=1e6 ";
  train(2, loads_after_a_failed_backward, "after", common + "offload.overlap=false" + states("cpu"));
  for (const std::string tier : {"cpu", "nvme"}) {
    train(2, loads_after_a_failed_backward, tier, common + kAlways + states(tier));
    EXPECT_EQ(hash(tier), hash("after")) << tier;
  }
}

TEST_F(SpeculationTest, IsPlannedIfItFitsInTheHostBudget) {
  const std::string common = "strategy=zero2 train.steps=3 train.gradient_accumulation=1 train.gradient_clipping=1e6 ";
  run(2,
      "job.name=none" + states("nvme") + "\njob.name=fits memory.host_budget=1GiB" + states("nvme") +
          "\njob.name=never memory.host_budget=1GiB offload.speculate=never" + states("nvme") +
          "\njob.name=memory memory.host_budget=1GiB" + states("cpu") + "\njob.name=disk memory.host_budget=1GiB" +
          states("nvme") + "offload.gradients=nvme\n",
      common);
  for (const std::string name : {"none", "never", "disk"}) EXPECT_EQ(number(name, "/overlap/updates_early"), 0) << name;
  for (const std::string name : {"fits", "memory"}) EXPECT_EQ(number(name, "/overlap/updates_early"), 2) << name;
  for (const std::string tier : {"host", "disk"})
    for (const std::string kind : {"staging", "optimizer"}) {
      const std::string at = "/memory/" + tier + "/" + kind;
      for (const std::string name : {"none", "fits", "memory"})
        EXPECT_EQ(number(name, at + "/planned"), number(name, at + "/peak")) << name << at;
    }
  EXPECT_EQ(number("fits", "/memory/disk/optimizer/peak"), 2 * number("none", "/memory/disk/optimizer/peak"));
  EXPECT_EQ(number("disk", "/memory/disk/optimizer/peak"), number("none", "/memory/disk/optimizer/peak"));
}

// The folder "small" is on a disk of three times a rank's states. When the engine exists, each rank has released a
// second copy that it had reserved.
RANK_BODY(trains_on_a_small_disk, Run) {
  run.build();
  struct statvfs disk {};
  EXPECT_EQ(::statvfs("small", &disk), 0);
  EXPECT_GT(6 * disk.f_bavail, disk.f_blocks) << "a second copy still takes space on the disk";
  run.train();
}

// The disk has space for the states of both ranks and for one of their two copies; in a mount namespace of its own.
TEST_F(SpeculationTest, ASecondCopyThatDoesNotFitOnTheDiskIsAWarningOrAnError) {
  const std::string common =
      "strategy=zero2 train.steps=3 train.gradient_accumulation=1 train.gradient_clipping=1e6 memory.host_budget=1GiB ";
  train(2, engine_tests::trains, "fits", common + states("nvme"));
  const int64_t copy = number("fits", "/memory/disk/optimizer/peak") / 2;
  const auto job = [&](const std::string& name, const std::string& keys) {
    return launch(
               2, trains_on_a_small_disk,
               common + states("nvme") + keys + " job.name=" + name + " offload.nvme.path=" + scratch_.path("small")) +
           "\necho code $?\n";
  };
  const std::string script =
      scratch_.write("small.sh", "mkdir -p small && mount -t tmpfs -o size=" + std::to_string(3 * copy) +
                                     " none small && echo mounted\n" + job("auto", "") + job("always", kAlways));
  Outcome done = shell("unshare --mount sh " + script);
  if (done.output.find("mounted") == std::string::npos) done = shell("unshare --mount --map-root-user sh " + script);
  if (done.output.find("mounted") == std::string::npos)
    GTEST_SKIP() << "cannot create a mount namespace: " << done.output;
  const std::string problem = "cannot reserve ", place = " bytes in " + scratch_.path("small") + ", ",
                    cause = " bytes are free: No space left on device; ";
  for (const std::string& text :
       {std::string("warning: offload.speculate = \"auto\" has no effect, because the disk has no space for a second "
                    "copy of the optimizer states, so their update begins after backward: "),
        problem, place, cause, std::string("code 0\n"),
        std::string(
            "; offload.speculate = \"always\" (command line) needs this space for a second copy of the optimizer "
            "states: set it to \"auto\" or \"never\" to train without the copy"),
        std::string("code 3\n")})
    EXPECT_THAT(done.output, HasSubstr(text));
  EXPECT_EQ(hash("auto"), hash("fits"));
  EXPECT_EQ(number("auto", "/overlap/states"), 0);
  // Of rank 0, which may have reserved its second copy before the other rank found no space.
  EXPECT_THAT(number("auto", "/memory/disk/optimizer/peak"), ::testing::AnyOf(copy, 2 * copy));
}

TEST_F(SpeculationTest, WarnsIfAlwaysHasNoEffect) {
  const std::string common = "strategy=zero2 train.steps=1 " + kAlways;
  for (const auto& [keys, reason] :
       {std::pair{"optimizer=lamb", "optimizer 'lamb' is not elementwise"},
        std::pair{"offload.gradients=nvme", "reduced gradients or weights are on a disk"},
        std::pair{"optimizer=lamb train.nonfinite=stop", "optimizer 'lamb' is not elementwise"}}) {
    const Outcome done = shell(launch(2, engine_tests::trains, common + states("nvme") + std::string(keys)));
    EXPECT_EQ(done.code, 0) << keys << done.output;
    EXPECT_THAT(done.output, HasSubstr("zeroth: warning: offload.speculate = \"always\" (command line) has no effect, "
                                       "because " +
                                       std::string(reason) + "\n"));
  }
  for (const std::string& keys : {states("nvme"), std::string()}) {
    const Outcome done = shell(launch(2, engine_tests::trains, common + keys));
    EXPECT_EQ(done.output.find("has no effect"), std::string::npos) << keys << done.output;
  }
}

// With "auto", updates wait for backward while more than half of the last steps were clipped.
TEST_F(SpeculationTest, StopsWhileMostStepsAreClipped) {
  const std::string common =
      "strategy=zero2 train.steps=5 train.gradient_accumulation=1 train.gradient_clipping=1e-4 memory.host_budget=1GiB";
  run(2, "job.name=auto" + states("cpu") + "\njob.name=always " + kAlways + states("cpu") + "\n", common);
  EXPECT_EQ(number("auto", "/overlap/updates_recomputed"), 0);
  EXPECT_EQ(number("always", "/overlap/updates_recomputed"), 4);
  EXPECT_EQ(hash("auto"), hash("always"));
}

// The losses of the first three steps are not scaled down, so that only these steps are clipped.
RANK_BODY(is_clipped_at_first, Run) {
  run.build();
  while (!run.engine->done()) {
    const int64_t step = run.engine->step_index();
    run.engine->backward(run.model->loss(step, run.engine->micro_index()) * (step < 3 ? 1 : 1e-6));
    run.engine->step();
  }
}

// With "auto", three clipped steps of six are no longer more than half.
TEST_F(SpeculationTest, ResumesAfterEnoughStepsWithoutClipping) {
  const std::string common =
      "strategy=zero2 train.steps=8 train.gradient_accumulation=1 train.gradient_clipping=1e-3 memory.host_budget=1GiB";
  train(2, is_clipped_at_first, "after", common + " offload.overlap=false" + states("cpu"));
  for (const std::string tier : {"cpu", "nvme"}) {
    train(2, is_clipped_at_first, "auto", common + states(tier));
    train(2, is_clipped_at_first, "always", common + " " + kAlways + states(tier));
    EXPECT_EQ(number("auto", "/overlap/updates_recomputed"), 0) << tier;
    EXPECT_EQ(number("auto", "/overlap/updates_early"), 2) << tier << ": steps 7 and 8";
    EXPECT_EQ(number("always", "/overlap/updates_recomputed"), 2) << tier << ": the first step records the order";
    EXPECT_EQ(number("always", "/overlap/updates_early"), 5) << tier;
    EXPECT_EQ(hash("auto"), hash("after")) << tier;
    EXPECT_EQ(hash("always"), hash("after")) << tier;
  }
}

TEST_F(SpeculationTest, SLOW_FaultsOfTheTierEndTheJobAndKeepTheCheckpoint) {
  const std::string common = "strategy=zero2 train.steps=4 train.gradient_clipping=1e6 ";
  train(2, engine_tests::trains, "plain", common);
  const std::string how =
      common + kAlways + "checkpoint.dir=c checkpoint.every=2 job.name=f" + disk() + "offload.optimizer=" + kFailing;
  for (const std::string fault : {"read=EIO@", "write=EIO@", "write=ENOSPC@", "flip@"})
    for (const std::string count : {"30", "80"}) {
      fs::remove_all(scratch_.path("c"));
      const Outcome failed = shell("ZR_TIER_FAULT=" + fault + count + " " + launch(2, engine_tests::trains, how));
      EXPECT_EQ(failed.code, 3) << fault << count << failed.output;
      const Outcome rest = shell(launch(2, engine_tests::trains, how + " checkpoint.resume=true"));
      ASSERT_EQ(rest.code, 0) << fault << count << rest.output;
      EXPECT_EQ(hash("f"), hash("plain")) << fault << count;
    }
}

}  // namespace
}  // namespace zr::test
