#include "multirank/parity/matrix.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <stdexcept>

namespace parity {

namespace {

Choice model(const std::string& name) {
  return {name, "parity.model=" + name, [name](Recipe& r) { r.model = name; }};
}
Choice dtype(const std::string& name) {
  // The initial scale causes no overflow, so that no fp16 step is skipped.
  return {name, "train.dtype=" + name + (name == "fp16" ? " fp16.initial_scale_power=10" : ""), [name](Recipe& r) {
            r.dtype = name;
            r.scale_power = 10;
          }};
}
Choice optimizer(const std::string& name) {
  return {name, "optimizer=" + name, [name](Recipe& r) { r.optimizer = name; }};
}
Choice accumulation(int steps) {
  return {"a" + std::to_string(steps), "train.gradient_accumulation=" + std::to_string(steps),
          [steps](Recipe& r) { r.micro_batches *= steps; }};
}
// States on tiers are updated during backward if no step can be skipped or clipped.
const char* const kEarly = "train.nonfinite=stop fp16.loss_scale=1024";
Choice ranks(int n) {
  return {"n" + std::to_string(n), "job.ranks=" + std::to_string(n), [n](Recipe& r) {
            r.micro_batches *= n;
            r.ranks = n;
          }};
}
Choice strategy(const std::string& name, const std::string& with = "") { return {name, "strategy=" + name + with}; }
// Weights are communicated, under zero3 all except small ones such as biases; shared() shares them on the node.
const char* const kCopied = " communicator.share_weights=false";
const char* const kGathered = " communicator.share_weights=false strategy.zero3.persistence_threshold=100";
Choice shared(const std::string& name) {
  return {name + "_shared", "strategy=" + name + " communicator.share_weights=true"};
}
// Offloads the state that an update reads and writes in addition to the weights; on disk, in blocks of one norm block.
// The process that starts the ranks creates the folders.
Choice tier(const std::string& name) {
  const std::string disk =
      " offload.nvme.path=" ZR_BUILD_DIR "/tests/swap offload.nvme.block_bytes=4KiB offload.nvme.depth=1";
  if (name == "nvme") return {name, "offload.optimizer=nvme" + disk};
  if (name == "nvme_gradients") return {name, "offload.gradients=nvme" + disk};
  if (name == "nvme_all") return {name, "offload.optimizer=nvme offload.gradients=nvme offload.parameters=nvme" + disk};
  if (name == "cpu") return {name, "offload.optimizer=cpu offload.gradients=cpu"};
  if (name == "cpu_states") return {name, "offload.optimizer=cpu"};  // a device keeps weights and gradients
  return {name, "offload.optimizer=nvme offload.device_fraction=0.5 offload.gradients=cpu" + disk};
}
// Gradients are reduced in a dtype other than that of the weights.
Choice reduced(const std::string& name) {
  return {"reduce_" + name, "gradients.reduce_dtype=" + name, [name](Recipe& r) { r.reduce_dtype = name; }};
}
Choice only_in_cover(Choice choice) {
  choice.in_full = false;
  return choice;
}

std::vector<Axis> make_axes() {
  return {
      {"model",
       {model("tied"), model("unused"), model("frozen"), model("used_twice"), model("indivisible"), model("large"),
        model("empty_shard"), model("with_dropout"), model("recomputed"), model("embeddings"), model("lstm"),
        model("torchscript"), model("everything")}},
      {"dtype", {dtype("fp32"), dtype("bf16"), dtype("fp16")}},
      {"optimizer", {optimizer("adamw"), optimizer("sgd")}},
      {"reduce",
       {{"each", "gradients.reduce=each_micro_step"},
        {"last", "gradients.reduce=last_micro_step", [](Recipe& r) { r.last = true; }}}},
      {"accumulation", {accumulation(1), accumulation(4)}},
      {"strategy",
       {strategy("zero0"), strategy("zero1", kCopied), strategy("zero2", kCopied), strategy("zero3", kGathered),
        shared("zero1"), shared("zero2"), shared("zero3"), only_in_cover(strategy("round_robin"))}},
      {"tier",
       {{"none", ""},
        tier("cpu"),
        tier("nvme"),
        only_in_cover(tier("both")),
        only_in_cover(tier("nvme_gradients")),
        only_in_cover(tier("nvme_all")),
        only_in_cover(tier("cpu_states"))}},
      {"ranks", {ranks(1), ranks(2), ranks(3), ranks(4)}},
      {"step",
       {{"clipped", "train.gradient_clipping=0.5", [](Recipe& r) { r.clip = 0.5; }},
        only_in_cover({"plain", kEarly}),
        only_in_cover({"weighted", "parity.weighted=true", [](Recipe& r) { r.weighted = true; }}),
        only_in_cover({"overflowing",
                       "train.steps=8 fp16.initial_scale_power=20 fp16.hysteresis=1 fp16.loss_scale_window=2",
                       [](Recipe& r) {
                         r.steps = 8;
                         r.scale_power = 20;
                         r.hysteresis = 1;
                         r.window = 2;
                       }})}},
      {"gradients",
       {{"fp32_gradients", ""},
        only_in_cover({"bf16_gradients", "gradients.dtype=bf16",
                       [](Recipe& r) {
                         r.gradient_dtype = "bf16";
                         r.reduce_dtype = r.last ? "" : "bf16";
                       }}),
        only_in_cover(reduced("bf16")),
        only_in_cover(reduced("fp16")),
        only_in_cover(reduced("fp32"))}},
  };
}

// The choices at these indices.
std::vector<const Choice*> choices_of(const std::vector<std::size_t>& at) {
  std::vector<const Choice*> choices;
  for (std::size_t i = 0; i < at.size(); ++i) choices.push_back(&axes()[i].choices[at[i]]);
  return choices;
}

TestCase make_case(const std::vector<std::size_t>& at) {
  TestCase test_case{at, "", {}, 1, ""};
  for (const Choice* choice : choices_of(at)) {
    test_case.overrides += (test_case.overrides.empty() ? "" : " ") + choice->overrides;
    choice->apply(test_case.recipe);
  }
  test_case.ranks = test_case.recipe.ranks;
  return test_case;
}

// Whether the choices can be combined: an overflow needs a loss scale; gradients held until the last micro-step are
// reduced in the dtype of the reduced gradients; shared weights need two ranks. Only reduced gradients in a buffer of
// their own, and weights that are sharded over ranks, can be on disk.
bool sensible(const std::vector<std::size_t>& at) {
  const auto chosen = [&](const char* name) { return axes()[axis(name)].choices[at[axis(name)]].name; };
  const auto is = [&](const char* name, const std::string& choice) { return chosen(name) == choice; };
  if (is("ranks", "n1") && chosen("strategy").find("_shared") != std::string::npos) return false;
  const std::string strategy = chosen("strategy");
  const bool in_place = (is("reduce", "last") && strategy != "round_robin") ||
                        (strategy.starts_with("zero1") && is("accumulation", "a1"));
  if (in_place && (is("tier", "nvme_gradients") || is("tier", "nvme_all"))) return false;
  const bool sharded =
      strategy == "zero3" && !is("ranks", "n1") && !is("model", "empty_shard");  // empty_shard has only small weights
  if (is("tier", "nvme_all") && !sharded) return false;
  if (is("step", "overflowing") && !is("dtype", "fp16")) return false;
  return is("reduce", "each") || is("gradients", "fp32_gradients") || is("gradients", "bf16_gradients");
}

std::vector<std::vector<std::size_t>> product() {
  std::vector<std::vector<std::size_t>> all{{}};
  for (const Axis& axis : axes()) {
    std::vector<std::vector<std::size_t>> longer;
    for (const auto& at : all)
      for (std::size_t i = 0; i < axis.choices.size(); ++i) {
        longer.push_back(at);
        longer.back().push_back(i);
      }
    all = std::move(longer);
  }
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& at) { return !sensible(at); }), all.end());
  return all;
}

}  // namespace

const std::vector<Axis>& axes() {
  static const std::vector<Axis> list = make_axes();
  return list;
}

std::size_t axis(const std::string& name) {
  const auto at = std::find_if(axes().begin(), axes().end(), [&](const Axis& a) { return a.name == name; });
  if (at == axes().end()) throw std::invalid_argument("the matrix has no axis '" + name + "'");
  return static_cast<std::size_t>(at - axes().begin());
}

std::string TestCase::name() const {
  std::string name;
  for (const Choice* choice : choices_of(at)) name += (name.empty() ? "" : "-") + choice->name;
  return extra.empty() ? name : name + "-" + extra;
}

bool TestCase::matches(const std::string& word) const {
  return ::fnmatch(("*" + word + "*").c_str(), name().c_str(), 0) == 0;
}

TestCase with(TestCase test_case, const std::string& extra, const std::string& overrides,
              const std::function<void(Recipe&)>& apply) {
  test_case.extra += (test_case.extra.empty() ? "" : "-") + extra;
  test_case.overrides += " " + overrides;
  apply(test_case.recipe);
  return test_case;
}

TestCase test_case(const std::vector<std::string>& choices) {
  std::vector<std::size_t> at(axes().size(), 0);
  for (const std::string& wanted : choices) {
    bool found = false;
    for (std::size_t i = 0; i < axes().size(); ++i)
      for (std::size_t c = 0; c < axes()[i].choices.size(); ++c)
        if (axes()[i].choices[c].name == wanted) {
          at[i] = c;
          found = true;
        }
    if (!found) throw std::invalid_argument("the matrix has no choice '" + wanted + "'");
  }
  return make_case(at);
}

std::vector<TestCase> full() {
  std::vector<TestCase> cases;
  for (const auto& at : product()) {
    const auto choices = choices_of(at);
    if (std::all_of(choices.begin(), choices.end(), [](const Choice* c) { return c->in_full; }))
      cases.push_back(make_case(at));
  }
  return cases;
}

std::vector<TestCase> cover() {
  // One flag per pair of choices.
  std::vector<std::size_t> first{0};
  for (const Axis& axis : axes()) first.push_back(first.back() + axis.choices.size());
  std::vector<char> covered(first.back() * first.back(), 0);
  const auto for_each_new_pair = [&](const std::vector<std::size_t>& at, auto&& fn) {
    for (std::size_t i = 0; i < at.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) {
        char& pair = covered[(first[i] + at[i]) * first.back() + first[j] + at[j]];
        if (!pair) fn(pair);
      }
  };
  // Greedy: each iteration adds the test case with the most pairs that are not covered yet.
  const auto all = product();
  std::vector<TestCase> cases;
  for (;;) {
    const std::vector<std::size_t>* best = nullptr;
    int most = 0;
    for (const auto& at : all) {
      int fresh = 0;
      for_each_new_pair(at, [&](char&) { ++fresh; });
      if (fresh > most) {
        most = fresh;
        best = &at;
      }
    }
    if (!best) return cases;
    for_each_new_pair(*best, [](char& pair) { pair = 1; });
    cases.push_back(make_case(*best));
  }
}

}  // namespace parity
