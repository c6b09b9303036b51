// ZR-O01 to O07: what an optimizer reports, what it writes, and where parameters may be cut.
#include "conform/optimizer_rules.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <thread>

#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/names.hpp"

namespace zr::conform {

std::string optimizer_result(Case& test, const ParameterArrays::Layout& layout, const UpdateOptions& options) {
  TestHost host;
  OptimizerRun run(test, host);
  ParameterArrays arrays = run.arrays(layout, test.random());
  three_steps({&run}, {{&arrays, options}});
  return arrays.bits();
}

std::vector<Shape> supported_shapes(Case& test, const std::vector<Shape>& shapes) {
  TestHost host;
  return OptimizerRun(test, host).supported(shapes);
}

namespace {

constexpr uint32_t kDraftNeeds = 3;  // zr/abi/draft: bits that a library with a draft tag may set
constexpr uint32_t kNeedsLocalGradients = 2;
const std::vector<Shape> kSmallShapes{{1}, {31}, {1023}, {5000}, {1, 1}, {3, 5}, {24, 40}, {300, 40}, {20, 16, 25}};
const std::vector<Shape> kLargeShapes{{75011}, {1900, 40}};  // more elements than the engine passes at once

std::string problem_of(const zr_slot& slot, const Shape& shape, bool local_gradients) {
  if (!slot.name || !*slot.name) return "a state has no name";
  const std::string state = concat("state '", slot.name, "': ");
  if (std::strlen(slot.name) > 100) return state + "its name has more than 100 bytes";
  if (size_of(slot.dtype) == 0) return concat(state, "its dtype is ", slot.dtype);
  if (slot.shape < ZR_SLOT_LIKE_PARAM || slot.shape > ZR_SLOT_PER_COLUMN)
    return concat(state, "its shape is ", slot.shape);
  if (slot.flags & ~uint32_t{ZR_SLOT_RANK_PRIVATE | ZR_SLOT_TRANSIENT | ZR_SLOT_UNSHARDED})
    return concat(state, "its flags are ", slot.flags);
  if (slot.shape == ZR_SLOT_LIKE_PARAM)
    return (slot.flags == 0 || local_gradients) && slot.block == 0 ? "" : state + "its flags or block is not 0";
  if (slot.block == 0) return state + "its block is 0";
  const int64_t row = std::max<int64_t>(shape.empty() ? 1 : elements_of(shape) / std::max<int64_t>(shape[0], 1), 1);
  if (slot.shape == ZR_SLOT_PER_COLUMN && slot.block % row != 0)
    return concat(state, "its block is ", slot.block, ", no multiple of the ", row, " elements of a row");
  return "";
}

void describes_itself(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  bool supports = false;
  for (const Shape& shape : kShapes) {
    const auto description = run.describe_if_supported(shape);
    if (!description) continue;
    supports = true;
    const zr_optimizer_desc& desc = description->desc;
    require(desc.granularity >= ZR_ELEMENTWISE && desc.granularity <= 3, "granularity is ", desc.granularity);
    require(desc.needs <= kDraftNeeds, "needs is ", desc.needs, ", with unknown bits");
    require(desc.rsv == 0, "rsv is ", desc.rsv, ", not 0");
    require(desc.device_types & (1u << ZR_DEVICE_CPU), "device_types is ", desc.device_types, ", without CPU memory");
    require(desc.n_slots == 0 || desc.slots, "it has ", desc.n_slots, " states, but its list of states is NULL");
    require(desc.cost >= 0 && std::isfinite(desc.cost), "cost is ", desc.cost, ", must be finite and at least 0");
    std::set<std::string> names;
    for (const zr_slot& slot : description->slots) {
      if (const std::string problem = problem_of(slot, shape, (desc.needs & kNeedsLocalGradients) != 0);
          !problem.empty())
        fail("parameter of shape ", text_of(shape), ": ", problem);
      require(names.insert(slot.name).second, "two states have the name '", slot.name, "'");
    }
  }
  require(supports, "describe() returns ZR_UNSUPPORTED (2) for parameters of one to four dimensions");
}

void description_is_stable(Case& test) {
  constexpr int64_t kHuge = int64_t{1} << 20;
  TestHost host;
  OptimizerRun run(test, host);
  const auto text = [](const OptimizerRun& of, const Shape& shape) {
    const auto description = of.describe_if_supported(shape);
    return description ? description->text() : "not supported";
  };
  std::map<Shape, std::string> first;
  for (const Shape& shape :
       {Shape{}, Shape{0}, Shape{1}, Shape{kHuge * kHuge}, Shape{kHuge, kHuge}, Shape{24, 40}, Shape{5000}}) {
    first[shape] = text(run, shape);
    require(text(run, shape) == first[shape], "describe() differs in its second call for a parameter of shape ",
            text_of(shape));
  }
  for (const Shape& shape : run.supported(kShapes)) {
    ParameterArrays arrays = run.arrays({.shape = shape}, test.random());
    run.update(arrays);
  }
  for (const auto& [shape, before] : first)
    require(text(run, shape) == before, "describe() of a parameter of shape ", text_of(shape), " differs after step()");
  TestHost other_host;
  OptimizerRun other(test, other_host);
  for (const auto& [shape, before] : first)
    require(text(other, shape) == before, "describe() of a parameter of shape ", text_of(shape),
            " differs in another instance");
}

void writes_only_its_views(Case& test) {
  TestHost host;
  OptimizerRun run(test, host);
  std::mt19937_64 random = test.random(1);
  for (const zr_dtype dtype : kWeightDtypes)
    for (const Shape& shape : run.supported(kSmallShapes)) {
      test.note("updating a parameter of shape ", text_of(shape), " with weights of ", name_of(dtype));
      ParameterArrays arrays = run.arrays({.shape = shape, .weight_dtype = dtype}, test.random());
      const std::string gradient = arrays.grad.content();
      run.update(arrays);
      arrays.check_surroundings(gradient);
      const Cuts cuts = arrays.description.random_cuts(random);
      if (cuts.size() < 3) continue;
      const std::vector<std::string> before = arrays.contents();  // only one slice is updated now
      run.update(arrays, {.cuts = {cuts[1]}, .step = 2});
      arrays.check_rest(before, cuts[1]);
    }
}

// The parameter is cut, and its slices are updated by the instances of three ranks.
void check_cuts(Case& test, const ParameterArrays::Layout& layout, int tries, std::mt19937_64& random) {
  const std::string uncut = optimizer_result(test, layout);
  std::array<TestHost, 3> hosts;
  std::vector<std::unique_ptr<OptimizerRun>> runs;
  for (TestHost& host : hosts) runs.push_back(std::make_unique<OptimizerRun>(test, host));
  const std::vector<const OptimizerRun*> three{runs[0].get(), runs[1].get(), runs[2].get()}, one{runs[0].get()};
  for (int i = 0; i < tries; ++i) {
    ParameterArrays arrays = runs[0]->arrays(layout, test.random());
    const Cuts cuts = arrays.description.random_cuts(random);
    const bool ranks = i % 2;
    test.note("updating a parameter of shape ", text_of(layout.shape), " in ", cuts.size(), " slices");
    three_steps(ranks ? three : one, {{&arrays, {.cuts = cuts, .one_call = i % 4 < 2}}});
    require(arrays.bits() == uncut, "the result differs if the parameter of shape ", text_of(layout.shape),
            " is cut into ", cuts.size(), " slices", ranks ? ", for instances of three ranks" : "");
  }
}

void cuts_change_nothing(Case& test) {
  std::mt19937_64 random = test.random(1);
  const auto can_be_cut = [&](const Shape& shape) {
    TestHost host;
    const Description description = OptimizerRun(test, host).describe(shape);
    return description.is_elementwise() || description.cut_block() < elements_of(shape);
  };
  std::vector<Shape> small, large;
  for (const Shape& shape : supported_shapes(test, kShapes))
    if (can_be_cut(shape)) small.push_back(shape);
  for (const Shape& shape : supported_shapes(test, kLargeShapes))
    if (can_be_cut(shape)) large.push_back(shape);
  if (small.empty()) skip("the optimizer updates complete parameters only (ZR_TENSORWISE)");
  for (const Shape& shape : small)
    for (const zr_dtype dtype : kWeightDtypes) check_cuts(test, {.shape = shape, .weight_dtype = dtype}, 6, random);
  for (const Shape& shape : large) check_cuts(test, {.shape = shape, .weight_dtype = ZR_BF16}, 4, random);
}

void results_are_deterministic(Case& test) {
  for (const Shape& shape : supported_shapes(test, kShapes))
    for (const zr_dtype dtype : kWeightDtypes) {
      const ParameterArrays::Layout layout{.shape = shape, .weight_dtype = dtype};
      const std::string first = optimizer_result(test, layout);
      for (int i = 0; i < 3; ++i)
        require(optimizer_result(test, layout) == first, "the same update of a parameter of shape ", text_of(shape),
                " gives another result");
    }
}

void alignment_changes_nothing(Case& test) {
  for (const Shape& shape : supported_shapes(test, kShapes)) {
    const std::string aligned = optimizer_result(test, {.shape = shape});
    for (const std::size_t elements : {1, 3, 7, 8, 15})
      require(optimizer_result(test, {.shape = shape, .shift = elements * 4}) == aligned,
              "the result for a parameter of shape ", text_of(shape), " differs if its memory begins ", elements,
              " elements after a multiple of 64 bytes");
  }
}

// One thread for each list of parameters: it updates them, beginning with another one than its neighbors.
void update_by_threads(const OptimizerRun& run, std::vector<std::vector<ParameterArrays>>& lists, int64_t step) {
  std::atomic<std::size_t> started{0};
  std::vector<std::string> problems(lists.size());
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < lists.size(); ++t)
    threads.emplace_back([&, t] {
      try {
        for (++started; started < lists.size();) std::this_thread::yield();
        for (std::size_t i = 0; i < lists[t].size(); ++i)
          run.update(lists[t][(i + t) % lists[t].size()], {.step = step});
      } catch (const Failure& failure) {
        problems[t] = failure.reason;
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& problem : problems) require(problem.empty(), problem);
}

void check_threads(Case& test, const Shape& shape) {
  constexpr std::size_t kThreads = 4, kParameters = 6;
  const auto parameters = [&](const OptimizerRun& run) {
    std::vector<ParameterArrays> all;
    for (std::size_t i = 0; i < kParameters; ++i) all.push_back(run.arrays({.shape = shape}, test.random(i)));
    return all;
  };
  TestHost alone_host;
  OptimizerRun alone(test, alone_host);
  std::vector<ParameterArrays> expected = parameters(alone);
  for (ParameterArrays& one : expected) three_steps({&alone}, {{&one}});
  for (int round = 0; round < 6; ++round) {
    TestHost host;
    OptimizerRun run(test, host);
    std::vector<std::vector<ParameterArrays>> lists;
    for (std::size_t t = 0; t < kThreads; ++t) lists.push_back(parameters(run));
    for (int64_t step = 1; step <= 3; ++step) {  // the host makes one step at a time
      update_by_threads(run, lists, step);
      for (auto& list : lists)
        for (ParameterArrays& one : list) one.new_gradient();
    }
    for (const auto& list : lists)
      for (std::size_t i = 0; i < kParameters; ++i)
        require(list[i].bits() == expected[i].bits(),
                "four threads at once give another result for a parameter of shape ", text_of(shape), " than one");
  }
}

void threads_at_once(Case& test) {
  for (const Shape& shape : supported_shapes(test, kShapes)) check_threads(test, shape);
}

constexpr Rule kRules[] = {
    {"ZR-O01", "optimizer", "describe() reports a known granularity, CPU memory, and states with names and dtypes.",
     describes_itself},
    {"ZR-O02", "optimizer", "describe() gives the same result for every parameter, at any time, in any instance.",
     description_is_stable},
    {"ZR-O03", "optimizer", "step() writes the weight, the master and the states of its slices, and nothing else.",
     writes_only_its_views},
    {"ZR-O04", "optimizer",
     "The result does not depend on how parameters are cut, nor on the ranks that update the parts.",
     cuts_change_nothing},
    {"ZR-O05", "optimizer", "The same update gives the same bits, in every instance.", results_are_deterministic},
    {"ZR-O06", "optimizer", "The result does not depend on the alignment of the memory.", alignment_changes_nothing},
    {"ZR-O07", "optimizer", "Several threads may call step() at once on disjoint data.", threads_at_once},
};

}  // namespace

std::span<const Rule> optimizer_rules() { return kRules; }

}  // namespace zr::conform
