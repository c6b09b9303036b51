#include "conform/optimizer_run.hpp"

#include <algorithm>

#include "conform/local_gradients_run.hpp"
#include "conform/use.hpp"
#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/partial_sums.h"

namespace zr::conform {

namespace {

const zr_partial_sums_api* sums_api_of(const Instance& instance) {
  return extension_of<zr_partial_sums_api>(instance, "zr.optimizer.partial_sums/1");
}

Cuts cuts_of(const ParameterUpdate& update) {
  return update.options.cuts.empty() ? Cuts{{0, update.arrays->count}} : update.options.cuts;
}

const zr_update_slice* slice_of(ArgumentMemory& arguments, const ParameterUpdate& update, uint32_t param,
                                std::size_t cut, uint32_t pass = 0) {
  const auto& [arrays, options] = update;
  const Cuts cuts = cuts_of(update);
  const auto [first, n] = cuts[cut];
  zr_update_slice slice{};
  slice.group = options.group;
  slice.name = arguments.text(concat("layer.", param, ".weight"));
  slice.shape = arguments.list(arrays->layout.shape);
  slice.ndim = static_cast<int32_t>(arrays->layout.shape.size());
  slice.param = param;
  slice.first = slice.grad_first = first;
  slice.count = slice.grad_count = n;
  slice.step = options.step;
  slice.lr = options.lr;
  slice.weight = arrays->weight_view(first, n);
  slice.master = arrays->master_view(first, n);
  if (options.claimed_dtype != ZR_NONE && cut + 1 == cuts.size() && pass >= options.claimed_pass)
    slice.weight.dtype = options.claimed_dtype;
  slice.grad = arrays->grad_view(first, n);
  slice.slots = arguments.list(arrays->state_views(first, n));
  slice.flags = options.unknown_flags;
  return arguments.sized(slice);
}

const zr_step* step_of(ArgumentMemory& arguments, const UpdateOptions& options) {
  zr_step job{};
  job.grad_mul = options.grad_mul;
  job.step = options.job_step ? options.job_step : options.step;
  job.grad_norm = options.grad_norm;
  return arguments.sized(job);
}

template <class F>
Answer call_worker(const char* name, F&& fn) {
  TestHost::in_worker_call = true;
  Answer answer = call(name, fn);
  TestHost::in_worker_call = false;
  if (!answer.ok()) answer.text = concat(name, ": ", answer.text);
  return answer;
}

// The sums of one parameter: those of the blocks in the current pass, and the totals of the passes before.
struct Sums {
  std::vector<double> totals;
  std::optional<Array> blocks;
  uint32_t width = 0;
  void begin(const ParameterUpdate& update, uint32_t pass) {
    const Description& description = update.arrays->description;
    const int64_t n = (update.arrays->count + description.cut_block() - 1) / description.cut_block();
    width = description.sums[pass];
    blocks.emplace(static_cast<std::size_t>(n) * width * sizeof(double));
    std::memset(blocks->data(), 0, blocks->size());
  }
  // Adds the blocks in ascending order.
  void end(std::vector<double>* copy) {
    const std::size_t before = totals.size(), n = blocks->size() / sizeof(double);
    totals.resize(before + width, 0);
    for (std::size_t i = 0; i < n; ++i) totals[before + i % width] += blocks->as<double>()[i];
    if (copy) copy->insert(copy->end(), blocks->as<double>(), blocks->as<double>() + n);
  }
};

Answer pass_over(const OptimizerRun& run, const ParameterUpdate& update, uint32_t param, std::size_t cut, Sums& sums,
                 uint32_t pass) {
  const auto& [arrays, options] = update;
  const bool last = pass == arrays->description.sums.size();
  const int64_t block = arrays->description.cut_block();
  ArgumentMemory arguments(options.mode);
  zr_sums given{};
  given.pass = pass;
  given.block = block;
  given.totals = arguments.list(sums.totals);
  const int64_t first = cuts_of(update)[cut].first;
  if (!last) given.partial = sums.blocks->as<double>() + first / block * sums.width;
  const zr_sums* const passed = arguments.sized(given);
  const zr_update_slice* const slice = slice_of(arguments, update, param, cut, pass);
  const zr_step* const step = step_of(arguments, options);
  const auto function = last ? run.sums_api()->update : run.sums_api()->add_up;
  return call_worker(last ? "update()" : "add_up()",
                     [&](zr_error* error) { return function(run.instance().self(), step, slice, passed, error); });
}

// A slice of a parameter without passes.
struct StepSlice {
  std::size_t update, cut;
};

Answer call_step(const OptimizerRun& run, const std::vector<ParameterUpdate>& updates,
                 const std::vector<StepSlice>& slices) {
  const UpdateOptions& options = updates[slices[0].update].options;
  ArgumentMemory arguments(options.mode);
  std::vector<const zr_update_slice*> list;
  for (const auto& [update, cut] : slices)
    list.push_back(slice_of(arguments, updates[update], static_cast<uint32_t>(update), cut));
  const zr_step* const step = step_of(arguments, options);
  const auto* passed = arguments.list(list);
  zr_done* done = options.done ? options.done->abi() : nullptr;
  return call_worker("step()", [&](zr_error* error) {
    return run.api().step(run.instance().self(), step, passed, static_cast<uint32_t>(list.size()), nullptr, done,
                          error);
  });
}

Answer step_all(const std::vector<const OptimizerRun*>& ranks, const std::vector<ParameterUpdate>& updates) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<StepSlice> slices;
    for (std::size_t u = 0; u < updates.size(); ++u)
      for (std::size_t cut = rank; cut < cuts_of(updates[u]).size(); cut += ranks.size())
        if (updates[u].arrays->description.sums.empty()) slices.push_back({u, cut});
    if (slices.empty()) continue;
    if (updates[slices[0].update].options.one_call) {
      if (Answer answer = call_step(*ranks[rank], updates, slices); !answer.ok()) return answer;
      continue;
    }
    for (const StepSlice& slice : slices)
      if (Answer answer = call_step(*ranks[rank], updates, {slice}); !answer.ok()) return answer;
  }
  return {};
}

}  // namespace

Answer update_parameters(const std::vector<const OptimizerRun*>& ranks, const std::vector<ParameterUpdate>& updates) {
  std::vector<Sums> sums(updates.size());
  std::size_t passes = 0;
  for (const ParameterUpdate& update : updates) passes = std::max(passes, update.arrays->description.sums.size());
  for (uint32_t pass = 0; pass <= passes; ++pass)
    for (uint32_t param = 0; param < updates.size(); ++param) {
      const std::size_t own = updates[param].arrays->description.sums.size();
      if (own == 0 || pass > own) continue;
      if (pass < own) sums[param].begin(updates[param], pass);
      const std::size_t n = cuts_of(updates[param]).size();
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t cut = updates[param].options.one_call ? i : n - 1 - i;
        if (Answer answer = pass_over(*ranks[cut % ranks.size()], updates[param], param, cut, sums[param], pass);
            !answer.ok())
          return answer;
      }
      if (pass < own) sums[param].end(updates[param].options.block_sums);
    }
  return step_all(ranks, updates);
}

void three_steps(const std::vector<const OptimizerRun*>& ranks, const std::vector<ParameterUpdate>& updates) {
  std::vector<ParameterUpdate> now = updates;
  for (int i = 0; i < 3; ++i) {
    if (const Answer answer = update_parameters(ranks, now); !answer.ok()) fail("an update ", answer.said());
    for (ParameterUpdate& update : now) {
      ++update.options.step;
      if (update.options.job_step) ++update.options.job_step;
      update.arrays->new_gradient();
    }
  }
}

OptimizerRun::OptimizerRun(Case& test, TestHost& host, const KeyValues& values)
    : own_(std::make_unique<Instance>(test, host, values)),
      instance_(*own_),
      api_(instance_.api<zr_optimizer_api>()),
      sums_api_(sums_api_of(instance_)) {}

OptimizerRun::OptimizerRun(Instance& instance)
    : instance_(instance), api_(instance.api<zr_optimizer_api>()), sums_api_(sums_api_of(instance)) {}

std::optional<Description> OptimizerRun::describe_if_supported(const Shape& shape, const Mode& mode, uint32_t group,
                                                               uint32_t flags) const {
  ArgumentMemory arguments(mode);
  const zr_param* param =
      arguments.sized(zr_param{sizeof(zr_param), flags, arguments.text("layer.0.weight"), arguments.list(shape),
                               static_cast<int32_t>(shape.size()), group, elements_of(shape), 0, 0});
  zr_optimizer_desc* desc = arguments.sized(zr_optimizer_desc{});
  const Answer answer =
      call("describe()", [&](zr_error* error) { return api_.describe(instance_.self(), param, desc, error); });
  if (answer.code == ZR_UNSUPPORTED) {
    require(!answer.text.empty(), "describe() of a parameter of shape ", text_of(shape),
            " returned ZR_UNSUPPORTED (2), without a text");
    return {};
  }
  if (!answer.ok()) fail("describe() of a parameter of shape ", text_of(shape), " ", answer.said());
  Description description;
  ZR_TAKE(&description.desc, desc);
  if (desc->slots) description.slots.assign(desc->slots, desc->slots + desc->n_slots);
  description.shape = shape;
  if (!sums_api_) return description;
  uint32_t passes = 0, sums[ZR_MAX_PASSES] = {};
  must("passes()", [&](zr_error* error) { return sums_api_->passes(instance_.self(), param, &passes, sums, error); });
  description.passes = passes;
  description.sums.assign(sums, sums + std::min<uint32_t>(passes, ZR_MAX_PASSES));
  return description;
}

Description OptimizerRun::describe(const Shape& shape, const Mode& mode, uint32_t group, uint32_t flags) const {
  const auto description = describe_if_supported(shape, mode, group, flags);
  require(description.has_value(), "describe() does not support a parameter of shape ", text_of(shape));
  return *description;
}

std::vector<Shape> OptimizerRun::supported(const std::vector<Shape>& shapes) const {
  std::vector<Shape> some;
  for (const Shape& shape : shapes)
    if (describe_if_supported(shape)) some.push_back(shape);
  if (some.empty()) skip("describe() supports no parameter of this rule");
  return some;
}

ParameterArrays OptimizerRun::arrays(const ParameterArrays::Layout& layout, std::mt19937_64 random,
                                     uint32_t group) const {
  return {layout, describe(layout.shape, {}, group), random};
}

Answer OptimizerRun::add_group(uint32_t group, const KeyValues& values) const {
  ConfigTable& table = instance_.host().new_table(values);
  const Answer answer =
      call("add_group()", [&](zr_error* error) { return api_.add_group(instance_.self(), group, table.abi(), error); });
  table.ended = true;
  return answer;
}

Answer OptimizerRun::try_update(ParameterArrays& arrays, const UpdateOptions& options) const {
  return update_parameters({this}, {{&arrays, options}});
}

void OptimizerRun::update(ParameterArrays& arrays, const UpdateOptions& options) const {
  const Answer answer = try_update(arrays, options);
  if (!answer.ok()) fail("an update of a parameter of shape ", text_of(arrays.layout.shape), " ", answer.said());
}

void use_optimizer(Instance& instance, const Mode& mode) {
  const OptimizerRun run(instance);
  for (const zr_dtype dtype : {ZR_F32, ZR_BF16})
    for (const Shape& shape : {Shape{3000}, Shape{90, 40}, Shape{10, 20, 15}}) {
      const auto description = run.describe_if_supported(shape, mode);
      if (!description) continue;
      std::mt19937_64 random(1);
      ParameterArrays arrays({.shape = shape, .weight_dtype = dtype}, *description, random);
      for (const int64_t step : {1, 2})
        run.update(arrays, {.mode = mode, .cuts = description->random_cuts(random), .step = step});
    }
  use_local_gradients(run, mode);
}

}  // namespace zr::conform
