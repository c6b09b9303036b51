// engine.refresh() of an engine whose states, weights or activations are on tiers, whose checkpoints are written
// aside, or whose losses are scaled: as without, to the bit.
#include <filesystem>

#include "multirank/refresh_run.hpp"

namespace model_tests {

namespace {

namespace fs = std::filesystem;
using Keys = std::vector<std::string>;

Keys joined(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Place {
  std::string name;
  Keys keys;
  bool cuts = false;  // needs weights of which a rank has a part alone
};

std::string swap_of(const Run& run) { return run.program.text("job.runs") + "/swap"; }

// Blocks and depth are small, so that the parts here take several.
std::vector<Place> places(const Run& run) {
  const Keys disk{"offload.nvme.path=" + swap_of(run), "offload.nvme.block_bytes=4KiB", "offload.nvme.depth=1"};
  const auto on_disk = [&](const Keys& keys) { return joined(disk, keys); };
  const Keys activations{"offload.activations=nvme", "offload.activation_bytes=1B"};
  const Keys aside{"checkpoint.async=true", "checkpoint.every=1"};
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
      {"checkpoints aside", aside},
      {"checkpoints aside, states on disk", joined(on_disk(aside), {"offload.optimizer=nvme"})}};
}

// What a training was, and the weights at its end.
struct Told {
  std::map<std::string, History> histories;
  std::vector<double> losses, scales;
  std::string hash;
};

bool same_training(const Told& a, const Told& b) {
  return a.losses == b.losses && a.scales == b.scales && a.hash == b.hash && a.histories.size() == b.histories.size() &&
         std::equal(a.histories.begin(), a.histories.end(), b.histories.begin(),
                    [](const auto& x, const auto& y) { return x.first == y.first && equal(x.second, y.second); });
}

Told told(Training& t) { return {t.histories, t.losses, t.scales, t.engine->weights_hash()}; }

void drop(const Run& run, Training& t, const std::string& folder) {
  const int rank = t.engine->rank();
  t.engine->mean(0);  // all ranks are done with the folder
  t.engine.reset();
  if (rank == 0) fs::remove_all(folder);
  if (run.program.world() == 1 && fs::exists(swap_of(run)))
    require(fs::is_empty(swap_of(run)), "an engine leaves nothing in the folder of its tier");
}

// Part 'a' trains, from step 3 on with 'b'. Step 2 is skipped, just before the change; the checkpoint of step 4
// continues to the same.
Told changes(const Run& run, const SharingMode& how, const std::string& name, Keys keys) {
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
  require(both.engine->loss_scale() == scale, what + ": the loss scale is kept");
  both.train(3, 6);
  const Told all = told(both);
  both.engine.reset();

  Training again(run, how, joined(keys, {"checkpoint.every=0"}));
  again.net.add("a");
  again.net.add("b");
  again.start();
  again.engine->load(folder + "/step-00000004");
  again.train(4, 6);
  Told rest = all;
  for (auto& [part, history] : rest.histories) history.erase(history.begin(), history.end() - 2);
  for (auto* of_steps : {&rest.losses, &rest.scales}) of_steps->erase(of_steps->begin(), of_steps->begin() + 4);
  require(same_training(told(again), rest), what + ": the checkpoint behind the change continues to the same");
  drop(run, again, folder);
  return all;
}

// Each strategy once; sharing weights changes nothing about where they stand.
std::vector<SharingMode> strategies(int world) {
  if (world == 1) return {{"zero0", true}, {"zero3", true}};
  return {{"zero0", true}, {"zero1", true}, {"zero2", false}, {"zero3", false}};
}

void keeps_places(Run& run) {
  fs::create_directories(swap_of(run));
  const std::string type = "train.dtype=" + run.program.text("train.dtype");
  int made = 0;
  for (const SharingMode& how : strategies(run.program.world())) {
    const Told plain = changes(run, how, "plain " + type, {});
    for (const Place& place : places(run)) {
      if (place.cuts && (how.strategy != "zero3" || how.share)) continue;
      ++made;
      require(same_training(changes(run, how, place.name + " " + type, place.keys), plain),
              place.name + ", " + type + ", under " + how.text(run.program.world()) + ": as with all on the device");
    }
  }
  if (run.program.rank() == 0) std::cout << made << " are the same" << std::endl;
}

// fp16: the scale, the count of good steps, and how many overflows it still takes.
void keeps_scale(Run& run) {
  const Keys keys{"train.dtype=fp16", "fp16.initial_scale_power=12", "fp16.loss_scale_window=2"};
  struct Case {
    std::set<int64_t> skips;
    std::vector<double> scales;
  };
  // The second overflow halves, the first one is let pass; two good steps behind one double.
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
      require(both.scales == one.scales, "the scale moves as without a change" + under);
      require(equal(both.histories["a"], a), "'a' continues to the bit" + under);
      require(equal(both.histories["b"], b), "'b' begins anew" + under);
    }
}

// A model so small that one rank alone has something to save.
void saves_aside(Run& run) {
  const std::string folder = run.program.text("job.runs") + "/aside";
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
  require(equal({all.begin() + 2, all.begin() + 4}, {all.begin() + 4, all.end()}),
          "the first checkpoint continues to the same");
  small.engine->load(folder);
  require(small.engine->step_index() == 3, "the second one is whole, too");
}

}  // namespace

const engine_tests::Cases& tiers_cases() {
  static const engine_tests::Cases cases{
      {"refresh_keeps_places", keeps_places}, {"refresh_keeps_scale", keeps_scale}, {"saves_aside", saves_aside}};
  return cases;
}

}  // namespace model_tests
