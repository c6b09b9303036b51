#include "engine/local_gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "engine/saver.hpp"
#include "update/cast.hpp"
#include "update/norm.hpp"
#include "zr/ordered_reduce.hpp"

namespace zr::host::engine {

namespace {

constexpr int64_t kGathered = int64_t{256} << 10;  // elements of a shared array that are gathered at a time
constexpr int64_t kPart = 16 * plan::kNormBlock;   // elements that are read twice, the second time from a core's cache

// The elements in [first, first + count) of a parameter whose shared masters a rank writes: begin and end. The ranks of
// a host each write a part.
std::pair<int64_t, int64_t> written_part(const plan::MemoryPlan& plan, uint32_t param, int64_t first, int64_t count) {
  const plan::PlanInput::RankLocation location = plan.input.location_of(plan.rank);
  const int64_t blocks = plan::norm_blocks_of(plan.input.parameters[param].count);
  const auto cut = [&](int64_t rank) {
    return std::clamp(blocks * rank / location.ranks * plan::kNormBlock, first, first + count);
  };
  return {cut(location.index), cut(location.index + 1)};
}

}  // namespace

LocalGradients::LocalGradients(const job::StepContext& context, state::ShardedState& state)
    : context_(context),
      state_(state),
      plan_(plan::local_plan(context.plan)),
      api_(job::local_optimizer_of(context.plan.input, context.optimizers).api),
      memory_(context, plan_) {
  if (!api_) return;
  using Elements = state::LocalMemory::Elements;
  const plan::PlanInput& input = context.plan.input;
  std::size_t next = 1;  // after the gradients
  const auto& description = *std::ranges::find_if(input.descriptions, [](const plan::OptimizerDescription& d) {
    return (d.needs & ZR_OPT_NEEDS_LOCAL_GRADS) != 0;
  });
  for (const zr_slot& slot : description.private_slots)
    private_.push_back({slot.name, slot.flags & ZR_SLOT_UNSHARDED ? Elements::all : Elements::served, next++});
  if (plan_.has_replicas && context.plan.has_master) replicas_.push_back({"", Elements::all, next++});
  for (const zr_slot& slot : description.slots)
    if (plan_.has_replicas && (slot.flags & ZR_SLOT_UNSHARDED)) replicas_.push_back({slot.name, Elements::all, next++});
  ranges_.resize(input.parameters.size());
  for (std::size_t i = 0; i < ranges_.size(); ++i)
    for (const plan::ServedRange& range : plan_.ranges[i])
      ranges_[i].push_back({range.first, range.count, range.rank, 0});
  begun_.assign(input.parameters.size(), 0);
  non_finite_.assign(input.parameters.size(), 0);
  if (description.needs & ZR_OPT_NEEDS_COMM) bind();
  warn_if_unused();
}

void LocalGradients::bind() {
  const plugin::Instance& optimizer = context_.optimizers.main();
  if (!api_->bind)
    fail_internal(optimizer.call_text("bind") +
                  " is null, although it needs the communicator: this is a bug in the plug-in");
  context_.call_optimizer(optimizer, "bind",
                          [&](zr_error* error) { return api_->bind(optimizer.self(), context_.comm.ref(), error); });
}

void LocalGradients::warn_if_unused() {
  const config::Setting<int64_t>& steps = context_.config().train().steps;
  if (context_.rank() != 0 || needs_local(steps, nullptr)) return;
  log(ZR_LOG_WARN, fmt::format("optimizer '{}' communicates less than others only after a warm-up, which is longer "
                               "than this job: {} = {} ({}); shorten its warm-up, or choose another optimizer",
                               context_.optimizers.id(0), steps.key, steps.value, steps.origin.text()));
}

// Before the first step with local gradients. Collective.
void LocalGradients::prepare_memory(int64_t update) {
  if (has_memory_) return;
  const RecursiveMutexLock lock(context_.use);
  const checkpoint::CheckpointComm comm = checkpoint_comm_of(context_.setup.control);
  const auto on_all_ranks = [&](const auto& allocate) {
    run_on_all_ranks(comm, [&] {
      try {
        allocate();
      } catch (const EnvironmentError& failure) {
        fail_environment(fmt::format(
            "the gradients of update {} are not reduced over ranks, for which optimizer '{}' needs {} per rank: {}; "
            "the step has not begun: free memory, or resume from a checkpoint with fewer ranks per host",
            update, context_.optimizers.id(0), bytes_text(context_.plan.local_bytes()), failure.what()));
      }
    });
  };
  try {
    on_all_ranks([&] { memory_.allocate_own(); });
    for (std::size_t array = 0; array < plan_.arrays.size(); ++array)
      if (memory_.is_shared(array)) on_all_ranks([&] { memory_.allocate(array); });
  } catch (...) {
    memory_.free();
    throw;
  }
  make_slices();
  has_memory_ = true;
}

void LocalGradients::make_slices() {
  slices_.clear();
  rounded_.clear();
  for (update::UpdateSlice slice : state_.slices()) {
    slice.grad = part_of(gradient(slice.param), slice.first, slice.count);
    slices_.push_back(std::move(slice));
  }
  add_replicas();
}

// Slices for the elements of the weights that this rank holds for itself and other ranks own.
void LocalGradients::add_replicas() {
  if (!plan_.has_replicas) return;
  for (const plan::Piece& weight : context_.plan.rank_plan.weights) {
    if (context_.plan.input.parameters[weight.param].frozen || state_.buffers().readers()[weight.buffer]) continue;
    int64_t at = weight.first;
    for (const uint32_t u : state_.slices_of(weight.param)) {
      const update::UpdateSlice& own = state_.slices()[u];
      add_replica(weight.param, weight, at, own.first - at);
      at = own.first + own.count;
    }
    add_replica(weight.param, weight, at, weight.first + weight.count - at);
  }
}

void LocalGradients::add_replica(uint32_t param, const plan::Piece& weight, int64_t first, int64_t count) {
  if (count <= 0) return;
  update::UpdateSlice slice{};
  slice.param = param;
  slice.first = first;
  slice.count = count;
  slice.weight = part_of(state_.buffers().views()[weight.buffer], weight.offset + first - weight.first, count);
  const Array* const masters = context_.plan.has_master_of(param) ? &replicas_.front() : nullptr;
  if (masters) slice.master = part_of(view(*masters, param), first, count);
  if (masters && is_shared(*masters)) {
    // This rank updates its part of the masters, and rounds the others to its own weights.
    const auto [begin, end] = written_part(context_.plan, param, first, count);
    for (const auto& [from, to] : {std::pair(first, begin), std::pair(end, first + count)})
      if (to > from) rounded_.push_back(update::slice_part(context_.plan, slice, from - first, to - from));
    slice = update::slice_part(context_.plan, slice, begin - first, end - begin);
    if (slice.count == 0) return;
    slice.master = part_of(memory_.writable(masters->index, param), slice.first, slice.count);
  }
  slice.grad = part_of(gradient(param), slice.first, slice.count);
  const auto replica_of = [&](const std::string& slot) {
    for (const Array& array : replicas_)
      if (array.slot == slot) return part_of(view(array, param), slice.first, slice.count);
    return zr_view{nullptr, 0, ZR_F32, 0, kHostMemory};
  };
  for (const zr_slot& slot : context_.plan.input.description(param).slots) slice.slots.push_back(replica_of(slot.name));
  slices_.push_back(std::move(slice));
}

// After the update of the masters that the ranks of a host share. Collective.
void LocalGradients::round_shared_masters(const std::vector<char>& touched) {
  if (replicas_.empty() || !replicas_.front().slot.empty() || !is_shared(replicas_.front())) return;
  for (const update::UpdateSlice& own : state_.slices()) {
    if (!touched[own.param]) continue;
    const auto [begin, end] = written_part(context_.plan, own.param, own.first, own.count);
    const zr_view to = part_of(memory_.writable(replicas_.front().index, own.param), begin, end - begin);
    std::memcpy(to.data, part_of(own.master, begin - own.first, end - begin).data,
                static_cast<std::size_t>(end - begin) * sizeof(float));
  }
  context_.comm.barrier("masters that the ranks of a host share");
  for (const update::UpdateSlice& slice : rounded_) {
    if (!touched[slice.param]) continue;
    context_.pool.parallel_for((slice.count + kPart - 1) / kPart, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kPart, count = std::min(end * kPart, slice.count) - first;
      const zr_view to = part_of(slice.weight, first, count);
      update::downcast(static_cast<const float*>(slice.master.data) + first, count, to.dtype, to.data);
    });
  }
}

// before: null if `update` is later than the next one.
bool LocalGradients::needs_local(int64_t update, const zr_param_updates* before) const {
  const plugin::Instance& optimizer = context_.optimizers.main();
  uint32_t grads = ZR_GRADS_REDUCED;
  context_.call_optimizer(optimizer, "gradients", [&](zr_error* error) {
    return api_->gradients(optimizer.self(), update, before, &grads, error);
  });
  if (grads != ZR_GRADS_REDUCED && grads != ZR_GRADS_LOCAL)
    fail_internal(fmt::format("{} returned {}, which is not a ZR_GRADS_* value: this is a bug in the plug-in",
                              optimizer.call_text("gradients"), grads));
  return grads == ZR_GRADS_LOCAL;
}

bool LocalGradients::begin_step(int64_t update, const std::vector<int64_t>& all, const std::vector<int64_t>& local) {
  const zr_param_updates before{sizeof(zr_param_updates), static_cast<uint32_t>(all.size()), all.data(), local.data()};
  if (!api_) return false;
  if (needs_local(update, &before)) {
    prepare_memory(update);
    return true;
  }
  std::ranges::fill(begun_, 0);  // a step with reduced gradients changes what they began with
  memory_.free_own();
  has_memory_ = false;
  return false;
}

LocalGradients::NonFinite LocalGradients::non_finite() const {
  NonFinite found;
  for (uint32_t param = 0; param < non_finite_.size(); ++param) {
    if (non_finite_[param] > 0 && found.first_param < 0) found.first_param = param;
    found.elements += non_finite_[param];
  }
  return found;
}

// in_range(first, count): handles these elements of the sum and returns how many are not finite.
template <class F>
void LocalGradients::count_non_finite(uint32_t param, const F& in_range) {
  const int64_t count = context_.plan.input.parameters[param].count;
  std::atomic<int64_t> elements = 0;
  context_.pool.parallel_for((count + kPart - 1) / kPart, 1, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kPart; first < std::min(end * kPart, count); first += kPart)
      elements += in_range(first, std::min(kPart, count - first));
  });
  non_finite_[param] = elements;
}

void LocalGradients::set(uint32_t param, const zr_view& gradient) {
  const zr_view sum = this->gradient(param);
  count_non_finite(param, [&](int64_t first, int64_t count) {
    const zr_view from = part_of(gradient, first, count);
    const int64_t found = update::count_non_finite(from);
    copy_bytes(part_of(sum, first, count).data, from.data, count * int64_t{sizeof(float)}, true);
    return found;
  });
}

void LocalGradients::written(uint32_t param) {
  const zr_view sum = gradient(param);
  count_non_finite(param,
                   [&](int64_t first, int64_t count) { return update::count_non_finite(part_of(sum, first, count)); });
}

void LocalGradients::restart(uint32_t param) {
  if (!api_) return;
  begun_[param] = 0;
  states_are_stale_ = true;
}

void LocalGradients::restart() {
  std::ranges::fill(begun_, 0);
  masters_are_stale_ = states_are_stale_ = true;
}

// Gathers a tensor of a parameter from its owners. Collective.
void LocalGradients::gather(const Array& array, uint32_t param, state::LogicalTensor kind, const std::string& slot) {
  const zr_view all = view(array, param);
  if (!is_shared(array)) return state_.read(param, kind, slot, 0, all.count, static_cast<float*>(all.data));
  const bool writes = context_.plan.input.location_of(context_.rank()).index == 0;
  float* const shared = static_cast<float*>(memory_.writable(array.index, param).data);
  std::vector<float> part(static_cast<std::size_t>(std::min(kGathered, all.count)));
  for (int64_t first = 0; first < all.count; first += kGathered) {
    const int64_t count = std::min(kGathered, all.count - first);
    state_.read(param, kind, slot, first, count, part.data());
    if (writes) std::memcpy(shared + first, part.data(), static_cast<std::size_t>(count) * sizeof(float));
  }
}

// Collective.
void LocalGradients::gather_stale_replicas(uint32_t param) {
  for (const Array& array : replicas_) {
    if (!is_stale(array)) continue;
    gather(array, param, array.slot.empty() ? state::LogicalTensor::value : state::LogicalTensor::state, array.slot);
  }
}

// The values of the private states before their first use. Collective.
void LocalGradients::begin_private_states(uint32_t param) {
  for (const Array& array : private_) {
    if (array.all()) {
      gather(array, param, state::LogicalTensor::state, context_.plan.input.description(param).slots.front().name);
    } else if (const zr_view values = view(array, param); values.count > 0) {
      std::memset(values.data, 0, static_cast<std::size_t>(values.count) * sizeof(float));
    }
  }
}

// Gathers what this rank needs of the elements that other ranks own, unless it has it. Collective.
void LocalGradients::prepare(const std::vector<char>& touched) {
  const std::vector<plan::Parameter>& parameters = context_.plan.input.parameters;
  for (uint32_t param = 0; param < parameters.size(); ++param) {
    if (parameters[param].frozen || parameters[param].count == 0) continue;
    gather_stale_replicas(param);
    if (!begun_[param] && touched[param]) begin_private_states(param);
  }
  const auto is_written = [&](const Array& array) {  // by the first rank of each host
    return is_shared(array) && is_stale(array);
  };
  if (std::ranges::any_of(replicas_, is_written)) context_.comm.barrier("states that the ranks of a host share");
  masters_are_stale_ = states_are_stale_ = false;
}

void LocalGradients::exchange(const Input& input) {
  const std::vector<plan::Parameter>& parameters = context_.plan.input.parameters;
  std::vector<zr_view> states;
  states.reserve(parameters.size() * private_.size());
  std::vector<zr_local_gradient> list;
  for (uint32_t param = 0; param < parameters.size(); ++param) {
    const plan::Parameter& p = parameters[param];
    if (p.frozen || p.count == 0 || !input.touched[param]) continue;
    const zr_view* slots = states.data() + states.size();
    for (const Array& array : private_) states.push_back(view(array, param));
    list.push_back({sizeof(zr_local_gradient), p.optimizer_group, p.name.c_str(), param,
                    begun_[param] ? 0 : uint32_t{ZR_LOCAL_BEGINS}, p.count, gradient(param), slots,
                    ranges_[param].data(), static_cast<uint32_t>(ranges_[param].size()), 0});
  }
  std::vector<const zr_local_gradient*> pointers;
  for (const zr_local_gradient& gradient : list) pointers.push_back(&gradient);
  const zr_step step{sizeof(zr_step), input.grad_mul, input.number, std::numeric_limits<double>::quiet_NaN()};
  const plugin::Instance& optimizer = context_.optimizers.main();
  const RecursiveMutexLock lock(context_.use);
  const zr_view scratch = memory_.scratch();
  context_.call_optimizer(optimizer, "exchange", [&](zr_error* error) {
    return api_->exchange(optimizer.self(), &step, pointers.data(), static_cast<uint32_t>(pointers.size()), &scratch,
                          error);
  });
  for (const zr_local_gradient& gradient : list) begun_[gradient.param] = 1;
}

void LocalGradients::update(const Input& input) {
  prepare(input.touched);
  exchange(input);
  const update::UpdateInput update_input{
      1, input.number, std::numeric_limits<double>::quiet_NaN(), &input.steps, &input.rates, &input.touched};
  update::update({{&context_.optimizers.main(), nullptr}}, context_.pool, context_.plan, slices_, update_input);
  round_shared_masters(input.touched);
}

// A part of a state that this rank has; it is in memory, and not cut inside of a norm block.
zr_view LocalGradients::state_part(uint32_t param, std::size_t slot, int64_t first, int64_t count) const {
  for (const uint32_t u : state_.slices_of(param))
    if (const update::UpdateSlice& slice = state_.slices()[u];
        slice.first <= first && first + count <= slice.first + slice.count)
      return part_of(slice.slots[slot], first - slice.first, count);
  fail_internal(fmt::format("rank {} has no states for element {} of '{}'", context_.rank(), first,
                            context_.plan.input.parameters[param].name));
}

void LocalGradients::pass_state_sum(int64_t update, NormBlocks& norm) {
  if (!api_ || !api_->summed_state || !api_->state_sum) return;
  const plugin::Instance& optimizer = context_.optimizers.main();
  int32_t slot = -1;
  context_.call_optimizer(optimizer, "summed_state",
                          [&](zr_error* error) { return api_->summed_state(optimizer.self(), update, &slot, error); });
  if (slot < 0) return;
  const auto index = static_cast<std::size_t>(slot);
  for (const plan::OptimizerDescription& description : context_.plan.input.descriptions)
    if (index >= description.slots.size() || description.slots[index].dtype != ZR_F32 ||
        description.slots[index].shape != ZR_SLOT_LIKE_PARAM)
      fail_internal(fmt::format(
          "{} returned {}, which is not an fp32 state of its parameter's shape: this is a bug in the plug-in",
          optimizer.call_text("summed_state"), slot));
  const double sum = norm.ordered_sum_of(
      [&](uint32_t param, int64_t first, int64_t count) { return state_part(param, index, first, count); });
  context_.call_optimizer(optimizer, "state_sum",
                          [&](zr_error* error) { return api_->state_sum(optimizer.self(), update, sum, error); });
}

}  // namespace zr::host::engine
