// ZR-O18 and up: calls with several parameters, and sums over parameters.
#include <map>
#include <string>

#include "conform/optimizer_rules.hpp"
#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/optimizer_globals.h"
#include "zr/abi/draft/partial_sums.h"
#include "zr/names.hpp"

namespace zr::conform {

namespace {

void slices_have_their_own_values(Case& test) {
  const KeyValues values = Instance::values_for(test);
  TestHost host;
  const OptimizerRun run(test, host, values);
  KeyValues of_group_1 = values;
  if (const auto change = other_group_value(run.instance().component(), values))
    of_group_1[change->first] = change->second;
  require(run.add_group(1, of_group_1).ok(), "add_group(1) fails");
  const std::vector<Shape> shapes = run.supported(kShapes);
  for (const bool reversed : {false, true}) {
    std::vector<ParameterArrays> together, alone;
    std::vector<ParameterUpdate> updates, single;
    for (std::size_t i = 0; i < 6; ++i)
      for (auto* arrays : {&together, &alone})
        arrays->push_back(
            run.arrays({.shape = shapes[i % shapes.size()], .weight_dtype = kWeightDtypes[i % kWeightDtypes.size()]},
                       test.random(i), i % 2));
    std::mt19937_64 random = test.random(9);
    for (std::size_t i = 0; i < 6; ++i) {
      UpdateOptions options{.group = static_cast<uint32_t>(i % 2)};
      options.step = static_cast<int64_t>(1 + 3 * (reversed ? 5 - i : i));
      options.job_step = 20;
      options.lr = 1e-3 * static_cast<double>(1 + i);
      options.cuts = together[i].description.random_cuts(random);
      updates.push_back({&together[i], options});
      single.push_back({&alone[i], options});
    }
    three_steps({&run}, updates);
    for (const ParameterUpdate& update : single) {
      TestHost other_host;
      const OptimizerRun other(test, other_host, values);
      require(other.add_group(1, of_group_1).ok(), "add_group(1) fails");
      three_steps({&other}, {update});
    }
    for (std::size_t i = 0; i < 6; ++i)
      require(together[i].bits() == alone[i].bits(), "parameter ", i, " of 6, of shape ",
              text_of(together[i].layout.shape), " and with a learning rate and a step count of its own, is updated",
              " differently if other parameters are updated in the same step");
  }
}

// The supported shapes whose updates have passes.
std::vector<Shape> shapes_with_passes(const OptimizerRun& run) {
  if (!run.sums_api()) skip("the optimizer has no zr.optimizer.partial_sums/1: it needs no sums over parameters");
  std::vector<Shape> some;
  for (const Shape& shape : run.supported(kShapes))
    if (!run.describe(shape).sums.empty()) some.push_back(shape);
  if (some.empty()) skip("passes() reports no passes for any parameter");
  return some;
}

void passes_are_valid(Case& test) {
  TestHost host;
  const OptimizerRun run(test, host);
  shapes_with_passes(run);
  require(run.sums_api()->size >= sizeof(zr_partial_sums_api), "its table of zr.optimizer.partial_sums/1 is too short");
  require(run.sums_api()->passes && run.sums_api()->add_up && run.sums_api()->update,
          "a function of zr.optimizer.partial_sums/1 is NULL");
  for (const Shape& shape : run.supported(kShapes)) {
    const Description description = run.describe(shape);
    require(description.passes <= ZR_MAX_PASSES, "passes() reports ", description.passes,
            " passes for a parameter of shape ", text_of(shape), ", but there may be at most ", int{ZR_MAX_PASSES});
    for (const uint32_t sums : description.sums)
      require(sums > 0, "passes() reports a pass without sums for a parameter of shape ", text_of(shape));
    if (description.sums.empty()) continue;
    ParameterArrays arrays = run.arrays({.shape = shape}, test.random());
    three_steps({&run}, {{&arrays}});
    require(run.describe(shape).sums == description.sums, "passes() of a parameter of shape ", text_of(shape),
            " differs after an update");
  }
}

// One pass over one slice, called directly.
void add_up(const OptimizerRun& run, ParameterArrays& arrays, const std::pair<int64_t, int64_t>& range, uint32_t pass,
            const std::vector<double>& totals, double* partial) {
  ArgumentMemory arguments({});
  zr_update_slice slice{};
  slice.name = "layer.0.weight";
  slice.shape = arrays.layout.shape.data();
  slice.ndim = static_cast<int32_t>(arrays.layout.shape.size());
  slice.first = slice.grad_first = range.first;
  slice.count = slice.grad_count = range.second;
  slice.step = 1;
  slice.lr = 3e-3;
  slice.weight = arrays.weight_view(range.first, range.second);
  slice.master = arrays.master_view(range.first, range.second);
  slice.grad = arrays.grad_view(range.first, range.second);
  const std::vector<zr_view> states = arrays.state_views(range.first, range.second);
  slice.slots = states.data();
  zr_step job{};
  job.grad_mul = 0.5f;
  job.step = 1;
  job.grad_norm = 1.5;
  zr_sums sums{};
  sums.pass = pass;
  sums.block = arrays.description.cut_block();
  sums.totals = arguments.list(totals);
  sums.partial = partial;
  const auto* const step = arguments.sized(job);
  const auto* const lent_slice = arguments.sized(slice);
  const auto* const lent_sums = arguments.sized(sums);
  must("add_up()", [&](zr_error* error) {
    return run.sums_api()->add_up(run.instance().self(), step, lent_slice, lent_sums, error);
  });
}

void add_up_writes_sums_and_states(Case& test) {
  TestHost host;
  const OptimizerRun run(test, host);
  std::mt19937_64 random = test.random(1);
  for (const Shape& shape : shapes_with_passes(run))
    for (const zr_dtype dtype : kWeightDtypes) {
      ParameterArrays arrays = run.arrays({.shape = shape, .weight_dtype = dtype}, test.random());
      const Description& description = arrays.description;
      for (const auto& range : description.random_cuts(random)) {
        const int64_t block = description.cut_block(), blocks = (range.second + block - 1) / block;
        test.note("pass 0 over elements ", range.first, " to ", range.first + range.second, " of a parameter of shape ",
                  text_of(shape));
        const Array partial(static_cast<std::size_t>(blocks) * description.sums[0] * sizeof(double));
        std::memset(partial.data(), 0, partial.size());
        const std::string gradient = arrays.grad.content(), weights = arrays.master_bits(),
                          weight16 = arrays.weight16.content();
        const std::vector<std::string> before = arrays.contents();
        add_up(run, arrays, range, 0, {}, partial.as<double>());
        require(partial.surroundings_are_intact(), "it wrote outside the sums of its blocks");
        require(arrays.master_bits() == weights, "it changed the ",
                arrays.has_16bit_weights() ? "master weight" : "weight");
        require(arrays.weight16.content() == weight16, "it wrote the ", name_of(dtype),
                " weight, as only update() does");
        arrays.check_surroundings(gradient);
        arrays.check_rest(before, range);
      }
    }
}

void sums_do_not_depend_on_slices(Case& test) {
  TestHost host;
  const OptimizerRun run(test, host);
  std::mt19937_64 random = test.random(1);
  bool has_blocks = false;
  for (const Shape& shape : shapes_with_passes(run)) {
    std::vector<double> uncut;
    ParameterArrays complete = run.arrays({.shape = shape}, test.random());
    has_blocks = has_blocks || complete.description.cut_block() < complete.count;
    run.update(complete, {.block_sums = &uncut});
    for (int i = 0; i < 6; ++i) {
      std::vector<double> sums;
      ParameterArrays arrays = run.arrays({.shape = shape}, test.random());
      const Cuts cuts = arrays.description.random_cuts(random);
      run.update(arrays, {.cuts = cuts, .one_call = i % 2 == 0, .block_sums = &sums});
      require(sums.size() == uncut.size() && std::memcmp(sums.data(), uncut.data(), sums.size() * sizeof(double)) == 0,
              "add_up() gives the blocks of a parameter of shape ", text_of(shape), " other sums if it is cut into ",
              cuts.size(), " slices");
    }
  }
  if (!has_blocks) skip("the optimizer gets complete parameters only");
}

// ---- globals

using Globals = std::map<std::string, std::string>;

Globals saved(const zr_optimizer_globals_api& api, void* self) {
  Globals globals;
  const zr_global_sink sink = [](void* to, const char* key, const void* value, uint64_t bytes) {
    (*static_cast<Globals*>(to))[key] = std::string(static_cast<const char*>(value), bytes);
  };
  must("save_globals()", [&](zr_error* error) { return api.save_globals(self, sink, &globals, error); });
  return globals;
}

void globals_are_restored(Case& test) {
  TestHost host, other_host;
  const OptimizerRun run(test, host), other(test, other_host);
  const auto* api = extension_of<zr_optimizer_globals_api>(run.instance(), "zr.optimizer.globals/1");
  if (!api) skip("the optimizer has no zr.optimizer.globals/1: all its state belongs to parameters");
  const Shape shape = run.supported(kShapes)[0];
  ParameterArrays arrays = run.arrays({.shape = shape}, test.random()),
                  same = run.arrays({.shape = shape}, test.random());
  three_steps({&run}, {{&arrays}});
  for (const Array* from : {&arrays.master, &arrays.grad})
    (from == &arrays.grad ? same.grad : same.master).fill(from->content());
  for (std::size_t i = 0; i < arrays.states.size(); ++i) same.states[i].fill(arrays.states[i].content());
  const Globals globals = saved(*api, run.instance().self());
  for (const auto& [key, value] : globals)
    must("load_global()", [&](zr_error* error) {
      return api->load_global(other.instance().self(), key.c_str(), value.data(), value.size(), error);
    });
  require(saved(*api, other.instance().self()) == globals, "save_globals() gives other values than load_global() got");
  run.update(arrays, {.step = 4});
  other.update(same, {.step = 4});
  require(arrays.bits() == same.bits(), "an instance that got the values of save_globals() updates differently");
  const Answer unknown = call("load_global()", [&](zr_error* error) {
    return api->load_global(other.instance().self(), "conform.unknown", "1", 1, error);
  });
  require(unknown.code == ZR_INVALID, "load_global() of an unknown key ", unknown.said(), "; expected ZR_INVALID");
}

void norm_is_ignored(Case& test) {
  TestHost host;
  const OptimizerRun run(test, host);
  bool any = false;
  for (const Shape& shape : run.supported(kShapes))
    for (const zr_dtype dtype : kWeightDtypes) {
      if (!(run.describe(shape).desc.flags & ZR_OPT_IGNORES_NORM)) continue;
      any = true;
      ParameterArrays before = run.arrays({.shape = shape, .weight_dtype = dtype}, test.random()),
                      after = run.arrays({.shape = shape, .weight_dtype = dtype}, test.random());
      three_steps({&run}, {{&before, {.grad_norm = 0}}});
      three_steps({&run}, {{&after, {.grad_norm = 1e6}}});
      require(before.bits() == after.bits(), "describe() reports ZR_OPT_IGNORES_NORM, but a parameter of shape ",
              text_of(shape), " is updated differently with another grad_norm");
    }
  if (!any) skip("describe() does not report ZR_OPT_IGNORES_NORM for any parameter");
}

constexpr Rule kRules[] = {
    {"ZR-O18", "optimizer",
     "A slice is updated with its own learning rate, step count and group, not with those of others.",
     slices_have_their_own_values},
    {"ZR-O19", "optimizer", "passes() reports at most ZR_MAX_PASSES passes, each with a sum, and always the same.",
     passes_are_valid},
    {"ZR-O20", "optimizer", "add_up() writes the sums of its blocks and the states of its slice, and nothing else.",
     add_up_writes_sums_and_states},
    {"ZR-O21", "optimizer", "The sums of a block do not depend on the slice that contains it.",
     sums_do_not_depend_on_slices},
    {"ZR-O22", "optimizer",
     "An instance with the values of save_globals() gives the same updates, and rejects unknown keys.",
     globals_are_restored},
    {"ZR-O23", "optimizer", "With ZR_OPT_IGNORES_NORM, updates do not depend on grad_norm.", norm_is_ignored},
};

}  // namespace

std::span<const Rule> optimizer_slice_rules() { return kRules; }

}  // namespace zr::conform
