#include "conform/local_gradients_run.hpp"

#include <limits>
#include <thread>

#include "conform/optimizer_rules.hpp"
#include "zr/names.hpp"

namespace zr::conform {

namespace {

constexpr const char* kOtherRank = "another rank has failed";
constexpr std::size_t kSpareBytes = 1 << 20;  // of messages, where their size is the subject of another rule
constexpr uint32_t kFrozen = 2;               // index of a parameter that is not trained
const std::vector<Shape> kModel{{5000}, {24, 40}, {1}, {300, 40}, {1024}, {20, 16, 25}};
Mutex control;  // [control] functions are called one at a time

// What gradients() of a step reports, for states that all have had `step - 1` updates; ZR_GRADS_REDUCED if it fails.
uint32_t gradients_of(const OptimizerRun& run, const zr_local_gradients_api& api, const FirstLocalStep& at,
                      uint32_t n_parameters) {
  const std::vector<int64_t> all(n_parameters, at.step - 1), local(n_parameters, at.local);
  const zr_param_updates updates{sizeof(zr_param_updates), n_parameters, all.data(), local.data()};
  uint32_t grads = ZR_GRADS_REDUCED;
  const Answer answer = call("gradients()", [&](zr_error* error) {
    return api.gradients(run.instance().self(), at.step, &updates, &grads, error);
  });
  return answer.ok() ? grads : uint32_t{ZR_GRADS_REDUCED};
}

// Consecutive blocks of a parameter belong to a random rank.
std::vector<zr_served_range> random_ranges(int64_t count, int world, uint64_t seed, std::mt19937_64& random) {
  if (seed == 0) return {{0, count, world - 1, 0}};
  std::vector<zr_served_range> ranges;
  for (int64_t first = 0; first < count;) {
    const int64_t n = std::min(kNormBlock * static_cast<int64_t>(1 + random() % 4), count - first);
    ranges.push_back({first, n, static_cast<int32_t>(random() % static_cast<uint64_t>(world)), 0});
    first += n;
  }
  return ranges;
}

void add_group_1(const OptimizerRun& run, const KeyValues& values) {
  const Answer answer = run.add_group(1, values);
  require(answer.ok(), "add_group(1) ", answer.said());
}

zr_view floats(const Array& array, int64_t first, int64_t count) {
  return view_of(array.as<float>() + first, count, ZR_F32);
}

}  // namespace

std::optional<FirstLocalStep> first_local_step(const OptimizerRun& run, const zr_local_gradients_api& api,
                                               uint32_t n_parameters) {
  for (const int64_t local : {0, 1})
    for (int64_t step = 1 + local; step < int64_t{1} << 50; step *= 2)
      if (gradients_of(run, api, {step, local}, n_parameters) == ZR_GRADS_LOCAL) return {{step, local}};
  return {};
}

const zr_local_gradients_api* local_gradients_of(const Instance& instance) {
  return extension_of<zr_local_gradients_api>(instance, "zr.optimizer.local_gradients/1");
}

uint32_t needs_of_local_optimizer(const OptimizerRun& run) {
  uint32_t needs = 0;
  for (const Shape& shape : run.supported(kShapes)) needs |= run.describe(shape).desc.needs;
  if (!(needs & ZR_OPT_NEEDS_LOCAL_GRADS))
    skip("describe() does not report ZR_OPT_NEEDS_LOCAL_GRADS: the optimizer needs reduced gradients only");
  return needs;
}

bool LocalParameter::is_private(std::size_t state) const {
  return (description.slots[state].flags & ZR_SLOT_RANK_PRIVATE) != 0;
}
bool LocalParameter::is_unsharded(std::size_t state) const {
  return (description.slots[state].flags & ZR_SLOT_UNSHARDED) != 0;
}

// ---- the start

LocalStart::LocalStart(Case& test, int world, uint64_t seed) : values(Instance::values_for(test)), of_group_1(values) {
  TestHost host, probe_host;
  const OptimizerRun run(test, host, values), probe(test, probe_host, values);
  needs_of_local_optimizer(run);
  const zr_local_gradients_api* const api = local_gradients_of(run.instance());
  if (!api || !api->gradients || !api->exchange || !api->plan)
    skip("it cannot be checked, because zr.optimizer.local_gradients/1 is missing or incomplete (ZR-O25)");
  if (const auto change = other_group_value(run.instance().component(), values))
    of_group_1[change->first] = change->second;
  for (const OptimizerRun* one : {&run, &probe}) add_group_1(*one, of_group_1);
  std::mt19937_64 random = test.random(500 + seed);
  for (const Shape& shape : run.supported(kModel)) {
    const auto i = static_cast<uint32_t>(parameters.size());
    const zr_dtype dtype = i % 2 ? ZR_BF16 : ZR_F32;
    parameters.push_back({concat("layer.", i, ".weight"),
                          {.shape = shape, .weight_dtype = dtype},
                          i < kFrozen ? i : i + 1,
                          i % 2,
                          run.describe(shape, {}, i % 2),
                          random_ranges(elements_of(shape), world, seed, random)});
    if (!(parameters.back().description.desc.needs & ZR_OPT_NEEDS_LOCAL_GRADS))
      skip("describe() does not report ZR_OPT_NEEDS_LOCAL_GRADS for all parameters");
    arrays.push_back(run.arrays(parameters.back().layout, test.random(i), i % 2));
  }
  const auto n = static_cast<uint32_t>(parameters.size()) + 1;
  const auto found = first_local_step(probe, *api, n);
  if (!found) skip("gradients() reports ZR_GRADS_LOCAL at no step");
  first = *found;
  for (int64_t step = 1; step <= 3; ++step) {
    if (gradients_of(run, *api, {step, 0}, n) == ZR_GRADS_LOCAL) return;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      run.update(arrays[i], {.group = parameters[i].group, .step = step});
      arrays[i].new_gradient();
    }
  }
}

// ---- a rank

LocalRank::LocalRank(Case& test, const LocalStart& start, const LocalOptions& options, World& world, int rank)
    : start_(start),
      mode_{.longer_structs = options.longer_structs},
      rank_(rank),
      world_(options.world),
      host_({.mode = mode_, .rank = rank, .world = options.world}),
      port_{world.ref(rank), 0, false},
      table_{sizeof(zr_collectives_api), 0, submit, progress},
      step_(start.first.step),
      updates_(start.parameters.size() + 1, start.first.step - 1),
      locals_(start.parameters.size() + 1, start.first.local),
      begun_(start.parameters.size(), false),
      random_(test.random(400)) {
  host_.on_wait = [&world](Completion& completion) { return world.wait(completion); };
  const MutexLock lock(control);
  run_.emplace(test, host_, start.values);
  add_group_1(*run_, start.of_group_1);
  api_ = local_gradients_of(run_->instance());
  bool needs_comm = false;
  for (std::size_t p = 0; p < start.parameters.size(); ++p) {
    const LocalParameter& parameter = start.parameters[p];
    const ParameterArrays& from = start.arrays[p];
    Arrays& to = arrays_.emplace_back(Arrays{
        run_->arrays(parameter.layout, test.random(1000 + p * 64 + static_cast<uint64_t>(rank)), parameter.group), {}});
    needs_comm |= (parameter.description.desc.needs & ZR_OPT_NEEDS_COMM) != 0;
    to.own.master.fill(from.master.content());
    to.own.weight16.fill(from.weight16.content());
    int64_t served = 0;
    for (const zr_served_range& range : parameter.ranges) served += range.rank == rank ? range.count : 0;
    for (std::size_t s = 0; s < from.states.size(); ++s) {
      to.own.states[s].fill(from.states[s].content());
      if (!parameter.is_private(s)) continue;
      const int64_t count = parameter.is_unsharded(s) ? from.count : served;
      const Array& state = to.private_states.emplace_back(static_cast<std::size_t>(count) * sizeof(float));
      std::memset(state.data(), 0, state.size());
      if (parameter.is_unsharded(s) && !parameter.is_private(0)) state.fill(from.states[0].content());
    }
  }
  if (needs_comm) {
    require(api_->bind, "describe() reports ZR_OPT_NEEDS_COMM, but bind is NULL");
    must("bind()", [&](zr_error* error) {
      return api_->bind(run_->instance().self(), {&table_, &port_, rank_, world_}, error);
    });
  }
  make_plan(options.exact_scratch);
}

// Calls plan(), and makes the memory for messages.
void LocalRank::make_plan(bool exact_scratch) {
  std::vector<int64_t> counts, served;
  for (const LocalParameter& parameter : start_.parameters) {
    counts.push_back(elements_of(parameter.layout.shape));
    for (const zr_served_range& range : parameter.ranges)
      if (range.rank == rank_) served.push_back(range.count);
  }
  ArgumentMemory arguments(mode_);
  zr_exchange_plan given{};
  given.world = world_;
  given.counts = arguments.list(counts);
  given.served = arguments.list(served);
  given.n_counts = static_cast<uint32_t>(counts.size());
  given.n_served = static_cast<uint32_t>(served.size());
  zr_exchange_plan* const passed = arguments.sized(given);
  must("plan()", [&](zr_error* error) { return api_->plan(run_->instance().self(), passed, error); });
  plan_.scratch = passed->scratch;
  plan_.received = passed->received;
  require(plan_.scratch < uint64_t{1} << 30, "plan() reports ", plan_.scratch, " bytes for messages");
  scratch_.emplace(static_cast<std::size_t>(plan_.scratch) + (exact_scratch ? 0 : kSpareBytes));
  std::memset(scratch_->data(), 0, scratch_->size());
}

zr_code LocalRank::submit(void* self, const zr_coll* coll, zr_stream* stream, zr_done* done, zr_error* error) {
  Port& port = *static_cast<Port*>(self);
  const auto world = static_cast<std::size_t>(port.inner.world), rank = static_cast<std::size_t>(port.inner.rank);
  zr_coll own;
  ZR_TAKE(&own, coll);
  const RankCollective given(own, port.inner.world);
  int64_t received = 0;  // elements from other ranks
  if (own.op == ZR_ALL_GATHER || (own.op == ZR_GATHER && own.root == port.inner.rank))
    received = own.dst.count - own.src.count;
  if (own.op == ZR_ALL_TO_ALL)
    received =
        own.dst.count - (given.counts.empty() ? own.src.count / static_cast<int64_t>(world) : given.counts[rank]);
  if ((own.op == ZR_BROADCAST || own.op == ZR_SCATTER) && own.root != port.inner.rank) received = own.dst.count;
  const zr_code code = port.inner.api->submit(port.inner.comm, coll, stream, done, error);
  port.failed |= code != ZR_OK;
  if (code == ZR_OK) port.received += static_cast<uint64_t>(received * size_of(own.dst.dtype));
  return code;
}
zr_code LocalRank::progress(void* self, zr_error* error) {
  const Port& port = *static_cast<Port*>(self);
  return port.inner.api->progress(port.inner.comm, error);
}

void LocalRank::ask_for_gradients() {
  ArgumentMemory arguments(mode_);
  const zr_param_updates* const updates = arguments.sized(
      zr_param_updates{0, static_cast<uint32_t>(updates_.size()), arguments.list(updates_), arguments.list(locals_)});
  uint32_t grads = ZR_GRADS_REDUCED;
  must("gradients()",
       [&](zr_error* error) { return api_->gradients(run_->instance().self(), step_, updates, &grads, error); });
  require(grads == ZR_GRADS_LOCAL, "gradients() reports ", grads, " for step ", step_,
          ", after ZR_GRADS_LOCAL for step ", start_.first.step);
}

Answer LocalRank::exchange(const std::vector<std::size_t>& parameters) {
  ask_for_gradients();
  ArgumentMemory arguments(mode_);
  std::vector<const zr_local_gradient*> list;
  for (const std::size_t p : parameters) {
    const LocalParameter& parameter = start_.parameters[p];
    Arrays& arrays = arrays_[p];
    arrays.own.new_gradient();
    zr_local_gradient gradient{};
    gradient.group = parameter.group;
    gradient.name = arguments.text(parameter.name);
    gradient.param = parameter.index;
    gradient.flags = begun_[p] ? 0 : uint32_t{ZR_LOCAL_BEGINS};
    gradient.count = arrays.own.count;
    gradient.grad = arrays.own.grad_view(0, arrays.own.count);
    std::vector<zr_view> states;
    for (const Array& state : arrays.private_states)
      states.push_back(floats(state, 0, static_cast<int64_t>(state.size() / sizeof(float))));
    gradient.slots = arguments.list(states);
    gradient.ranges = arguments.list(parameter.ranges);
    gradient.n_ranges = static_cast<uint32_t>(parameter.ranges.size());
    list.push_back(arguments.sized(gradient));
  }
  const zr_step* const job = arguments.sized(zr_step{0, 0.5f, step_, std::numeric_limits<double>::quiet_NaN()});
  const zr_view scratch = view_of(scratch_->data(), static_cast<int64_t>(scratch_->size()), ZR_U8);
  const auto* const passed = arguments.list(list);
  const Answer answer = call("exchange()", [&](zr_error* error) {
    return api_->exchange(run_->instance().self(), job, passed, static_cast<uint32_t>(list.size()), &scratch, error);
  });
  if (!answer.ok()) return answer;
  for (const std::size_t p : parameters) {
    begun_[p] = true;
    ++updates_[start_.parameters[p].index];
    ++locals_[start_.parameters[p].index];
  }
  ++step_;
  return answer;
}

void LocalRank::exchange() {
  std::vector<std::size_t> all;
  for (std::size_t p = 0; p < arrays_.size(); ++p) all.push_back(p);
  const Answer answer = exchange(all);
  require(answer.ok(), "exchange() ", answer.said());
}

void LocalRank::set_equal_gradients() {
  for (const Arrays& arrays : arrays_)
    for (int64_t i = 0; i < arrays.own.count; ++i)
      arrays.own.grad.as<float>()[i] = static_cast<float>(static_cast<int32_t>(random_() >> 32)) * 0x1p-33f;
}

void LocalRank::update() {
  ArgumentMemory arguments(mode_);
  std::vector<const zr_update_slice*> list;
  for (std::size_t p = 0; p < arrays_.size(); ++p) {
    const LocalParameter& parameter = start_.parameters[p];
    const ParameterArrays& own = arrays_[p].own;
    for (const zr_served_range& range : parameter.ranges) {
      zr_update_slice slice{};
      slice.group = parameter.group;
      slice.name = arguments.text(parameter.name);
      slice.shape = arguments.list(parameter.layout.shape);
      slice.ndim = static_cast<int32_t>(parameter.layout.shape.size());
      slice.param = parameter.index;
      slice.first = slice.grad_first = range.first;
      slice.count = slice.grad_count = range.count;
      slice.step = updates_[parameter.index];
      slice.lr = 3e-3;
      slice.weight = own.weight_view(range.first, range.count);
      slice.master = own.master_view(range.first, range.count);
      slice.grad = own.grad_view(range.first, range.count);
      std::vector<zr_view> states = own.state_views(range.first, range.count), given;
      for (std::size_t s = 0; s < states.size(); ++s)
        if (!parameter.is_private(s))
          given.push_back(range.rank == rank_ || parameter.is_unsharded(s) ? states[s] : view_of(nullptr, 0, ZR_F32));
      slice.slots = arguments.list(given);
      list.push_back(arguments.sized(slice));
    }
  }
  const zr_step* const job = arguments.sized(zr_step{0, 1, step_ - 1, std::numeric_limits<double>::quiet_NaN()});
  const auto* const passed = arguments.list(list);
  must("step()", [&](zr_error* error) {
    return run_->api().step(run_->instance().self(), job, passed, static_cast<uint32_t>(list.size()), nullptr, nullptr,
                            error);
  });
}

void LocalRank::check_states_of_others(std::size_t p, const std::vector<std::string>& before) const {
  const LocalParameter& parameter = start_.parameters[p];
  const ParameterArrays& own = arrays_[p].own;
  for (std::size_t s = 0; s < own.states.size(); ++s)
    for (const zr_served_range& range : parameter.ranges) {
      if (range.rank == rank_ || parameter.description.slots[s].dtype != ZR_F32) continue;
      const auto at = static_cast<std::size_t>(range.first) * sizeof(float),
                 n = static_cast<std::size_t>(range.count) * sizeof(float);
      require(own.states[s].content().compare(at, n, before[s + 2], at, n) == 0, "step() changes state '",
              parameter.description.slots[s].name, "' of elements that another rank owns");
    }
}

std::string LocalRank::gradients() const {
  std::string all;
  for (const Arrays& arrays : arrays_) all += arrays.own.grad.content();
  return all;
}
std::string LocalRank::private_states() const {
  std::string all;
  for (const Arrays& arrays : arrays_)
    for (const Array& state : arrays.private_states) all += state.content();
  return all;
}

void LocalRank::destroy() {
  const MutexLock lock(control);
  run_.reset();
}

void on_local_ranks(Case& test, const LocalStart& start, const LocalOptions& options,
                    const std::function<void(LocalRank&)>& body) {
  World world({.size = options.world,
               .longer_structs = options.longer_structs,
               .fail_at = options.fail_at.value_or(~uint64_t{0}),
               .code = options.code});
  Mutex mutex;
  std::string failed, skipped;
  const auto run_rank = [&](int rank) {
    try {
      LocalRank one(test, start, options, world, rank);
      body(one);
      one.check_host();
      world.leave(rank);
      one.destroy();
      return;
    } catch (const Failure& failure) {
      const MutexLock lock(mutex);
      if (failed.empty()) failed = concat("rank ", rank, " of ", options.world, ": ", failure.reason);
    } catch (const Skipped& reason) {
      const MutexLock lock(mutex);
      skipped = reason.reason;
    }
    world.stop(kOtherRank);
    world.leave(rank);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.world; ++rank) threads.emplace_back(run_rank, rank);
  for (std::thread& thread : threads) thread.join();
  if (const std::string problem = world.problem(); !problem.empty() && problem != kOtherRank) fail(problem);
  if (!failed.empty()) throw Failure{failed};
  if (!skipped.empty()) throw Skipped{skipped};
}

}  // namespace zr::conform
