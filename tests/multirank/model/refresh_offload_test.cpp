// engine.refresh() with states, weights or activations on tiers, with asynchronous checkpoints, or with a loss scale:
// the results are bit-identical to those without.
#include <filesystem>

#include "multirank/model/refresh_run.hpp"

namespace model_tests {
namespace {

namespace fs = std::filesystem;
using Keys = std::vector<std::string>;

Keys joined(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Placement {
  std::string name;
  Keys keys;
  bool cuts = false;  // needs weights that are sharded over the ranks
};

std::string swap_of(const Run& run) { return run.program.text("job.runs") + "/swap"; }

// Blocks and depth are small, so that these parts take several blocks.
std::vector<Placement> placements(const Run& run) {
  const Keys disk{"offload.nvme.path=" + swap_of(run), "offload.nvme.block_bytes=4KiB", "offload.nvme.depth=1"};
  const auto on_disk = [&](const Keys& keys) { return joined(disk, keys); };
  const Keys activations{"offload.activations=nvme", "offload.activation_bytes=1B"};
  const Keys async{"checkpoint.async=true", "checkpoint.every=1"};
  return {
      {"states in host memory", {"offload.optimizer=cpu"}},
      {"states on disk", on_disk({"offload.optimizer=nvme"})},
      {"half of the states on disk", on_disk({"offload.optimizer=nvme", "offload.device_fraction=0.5"})},
      {"weights in host memory", {"offload.parameters=cpu", "offload.gradients=cpu"}, true},
      {"weights on disk", on_disk({"offload.parameters=nvme"}), true},
      {"all on disk",
       joined(on_disk(activations), {"offload.optimizer=nvme", "offload.parameters=nvme", "offload.gradients=nvme"}),
       true},
      {"activations in host memory", {"offload.activations=cpu", "offload.activation_bytes=1B"}},
      {"activations on disk", on_disk(activations)},
      {"asynchronous checkpoints", async},
      {"asynchronous checkpoints, states on disk", joined(on_disk(async), {"offload.optimizer=nvme"})}};
}

// The values recorded during training, and the hash of the final weights.
struct Record {
  std::map<std::string, History> histories;
  std::vector<double> losses, scales;
  std::string hash;
};

bool same_training(const Record& a, const Record& b) {
  return a.losses == b.losses && a.scales == b.scales && a.hash == b.hash && a.histories.size() == b.histories.size() &&
         std::equal(a.histories.begin(), a.histories.end(), b.histories.begin(),
                    [](const auto& x, const auto& y) { return x.first == y.first && equal(x.second, y.second); });
}

Record record(Training& t) { return {t.histories, t.losses, t.scales, t.engine->weights_hash()}; }

void drop(const Run& run, Training& t, const std::string& folder) {
  const int rank = t.engine->rank();
  t.engine->mean(0);  // waits until all ranks are done with the folder
  t.engine.reset();
  if (rank == 0) fs::remove_all(folder);
  if (run.program.world() == 1 && fs::exists(swap_of(run))) {
    EXPECT_TRUE(fs::is_empty(swap_of(run))) << "an engine leaves no files in the folder of its tier";
  }
}

// Part 'a' trains alone, and from step 3 together with 'b'. Step 2, just before the change, is skipped; training that
// resumes from the checkpoint of step 4 is bit-identical.
Record changes(const Run& run, const SharingMode& how, const std::string& name, Keys keys) {
  const std::string folder = run.program.text("job.runs") + "/kept",
                    what = name + " under " + how.text(run.program.world());
  keys = joined({"checkpoint.dir=" + folder, "checkpoint.every=4"}, keys);
  Training both(run, how, keys);
  both.skips = {2};
  both.net.add("a");
  both.start();
  both.train(0, 3);
  const double scale = both.engine->loss_scale();
  both.net.add("b");
  both.engine->refresh();
  EXPECT_EQ(both.engine->loss_scale(), scale) << what + ": the loss scale is kept";
  both.train(3, 6);
  const Record all = record(both);
  both.engine.reset();

  Training again(run, how, joined(keys, {"checkpoint.every=0"}));
  again.net.add("a");
  again.net.add("b");
  again.start();
  again.engine->load(folder + "/step-00000004");
  again.train(4, 6);
  Record rest = all;
  for (auto& [part, history] : rest.histories) history.erase(history.begin(), history.end() - 2);
  for (auto* of_steps : {&rest.losses, &rest.scales}) of_steps->erase(of_steps->begin(), of_steps->begin() + 4);
  EXPECT_TRUE(same_training(record(again), rest)) << what + ": the checkpoint after the change resumes bit-identically";
  drop(run, again, folder);
  return all;
}

// Each strategy once; sharing weights does not change their tier.
std::vector<SharingMode> strategies(int world) {
  if (world == 1) return {{"zero0", true}, {"zero3", true}};
  return {{"zero0", true}, {"zero1", true}, {"zero3", false}};
}

RANK_BODY(refresh_keeps_places, Run) {
  fs::create_directories(swap_of(run));
  const std::string type = "train.dtype=" + run.program.text("train.dtype");
  int made = 0;
  for (const SharingMode& how : strategies(run.program.world())) {
    const Record plain = changes(run, how, "plain " + type, {});
    for (const Placement& placement : placements(run)) {
      if (placement.cuts && (how.strategy != "zero3" || how.share)) continue;
      ++made;
      EXPECT_TRUE(same_training(changes(run, how, placement.name + " " + type, placement.keys), plain))
          << placement.name + ", " + type + ", under " + how.text(run.program.world()) +
                 ": same results as with all state on the device";
    }
  }
  if (run.program.rank() == 0) std::cout << made << " placements match" << std::endl;
}

TEST_F(EngineModelTest, SLOW_RefreshIsBitIdenticalWithTiersAndAsynchronousCheckpoints) {
  for (const int ranks : {1, 2})
    for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
      const engine_tests::Result result =
          run(ranks, refresh_keeps_places, "fp16.initial_scale_power=12 fp16.loss_scale_window=2 train.dtype=" + dtype);
      EXPECT_EQ(result.code, 0) << dtype << " on " << ranks << "\n" << result.output;
      EXPECT_NE(result.output.find(ranks == 1 ? "14 placements match" : "24 placements match"), std::string::npos);
      EXPECT_TRUE(fs::is_empty(folder_ / "swap")) << "an engine left files in the folder of its tier";
    }
}

// fp16: the scale, the number of good steps, and the number of overflows left before the scale is halved.
MULTIRANK_TEST(EngineModelTest, SLOW_RefreshKeepsTheLossScaleOfFp16, {1, 2}) {
  const Keys keys{"train.dtype=fp16", "fp16.initial_scale_power=12", "fp16.loss_scale_window=2"};
  struct Case {
    std::set<int64_t> skips;
    std::vector<double> scales;
  };
  // The first overflow keeps the scale, the second halves it. After a first good step, every two good steps double it.
  const Case cases[] = {{{2, 4}, {4096, 4096, 4096, 4096, 2048, 2048}}, {{0}, {4096, 4096, 4096, 8192, 8192, 16384}}};
  for (const SharingMode& how : sharing_modes(run.program.world()))
    for (const Case& one : cases) {
      const auto alone = [&](const std::string& part, int64_t first) {
        Training training(run, how, keys);
        training.skips = one.skips;
        training.net.add(part);
        training.start();
        training.train(first, 6);
        return training.histories[part];
      };
      const History a = alone("a", 0), b = alone("b", 3);
      Training both(run, how, keys);
      both.skips = one.skips;
      both.net.add("a");
      both.start();
      both.train(0, 3);
      both.net.add("b");
      both.engine->refresh();
      both.train(3, 6);
      const std::string under = " under " + how.text(run.program.world());
      EXPECT_EQ(both.scales, one.scales) << "the scale moves as without a change" + under;
      EXPECT_TRUE(equal(both.histories["a"], a)) << "'a' continues bit-identically" + under;
      EXPECT_TRUE(equal(both.histories["b"], b)) << "'b' starts with new states" + under;
    }
}

// A model so small that only one rank has something to save.
MULTIRANK_TEST(EngineModelTest, SavesAsynchronouslyWhenARankHasNothingToSave, {1, 2, 3}) {
  const std::string folder = run.program.text("job.runs") + "/async";
  Training small(run, {"zero0", false}, {"checkpoint.async=true"});
  small.net.add("a");
  small.start();
  small.train(0, 2);
  small.engine->save(folder);
  small.train(2, 3);
  small.engine->save(folder);
  small.train(3, 4);
  small.engine->load(folder + "/step-00000002");
  small.train(2, 4);
  const History all = small.histories["a"];
  EXPECT_TRUE(equal({all.begin() + 2, all.begin() + 4}, {all.begin() + 4, all.end()}))
      << "the first checkpoint resumes bit-identically";
  small.engine->load(folder);
  EXPECT_EQ(small.engine->step_index(), 3) << "the second checkpoint is complete too";
}

}  // namespace
}  // namespace model_tests
