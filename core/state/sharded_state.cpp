#include "state/sharded_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "checkpoint/manifest.hpp"
#include "state/initial_weights.hpp"
#include "update/cast.hpp"
#include "update/norm.hpp"

namespace zr::host::state {

namespace {
offload::Tiers open_tiers(plugin::PluginHost& host,
                          const std::vector<std::shared_ptr<const plugin::Instance>>& instances, Trace* trace) {
  offload::Tiers tiers(1);  // the device
  for (const auto& instance : instances) {
    tiers.push_back(std::make_unique<offload::TierStore>(host, instance, static_cast<int>(tiers.size())));
    tiers.back()->set_trace(trace);
  }
  return tiers;
}

// The intersection of [first, first + count) and [from, from + n), as first element and count.
std::pair<int64_t, int64_t> common(int64_t first, int64_t count, int64_t from, int64_t n) {
  const int64_t begin = std::max(first, from);
  return {begin, std::max<int64_t>(0, std::min(first + count, from + n) - begin)};
}
}  // namespace

ShardedState::ShardedState(const job::StepContext& context, plugin::PluginHost& host,
                           const std::vector<std::shared_ptr<const plugin::Instance>>& tiers, Trace* trace)
    : context_(context),
      tiers_(open_tiers(host, tiers, trace)),
      buffers_(context, tiers_),
      release_{context.model, buffers_},
      states_(context.plan, tiers_, context.ledger, context.device) {
  const auto record_wait = [trace](const char* what, Trace::Time begin) {
    trace->span("training", what, begin, Trace::Time::clock::now());
  };
  if (trace) states_.on_wait(record_wait);
  if (!context.plan.device_staging.blocks.empty())
    device_updates_.emplace(context.plan, buffers_.views(), *context.device, context.ledger);
  if (trace && device_updates_) device_updates_->on_wait(record_wait);
  make_slices();
  bind_strategy();
  broadcast_initial_weights(context_, *this);
}

// Frees the buffers without weights first, then the model allocates its own memory for the weights.
ShardedState::ModelRelease::~ModelRelease() {
  buffers.free_all_but_weights();
  model.limit_temporaries(0, {});  // the model's own memory is not limited by the job's budget
  try {
    model.return_parameters();
  } catch (const std::exception& failure) {  // of the device that the model is on
    log(ZR_LOG_WARN, "the model does not get its parameters back: " + first_line(failure.what()));
  }
}

void ShardedState::check_tiers() const {
  for (const auto& store : tiers_)
    if (store && store->failed())
      fail_environment(store->failure() +
                       "; data on this tier is incomplete; stop and resume from the last checkpoint");
}

// The first of this rank's weight pieces that contains all elements of a piece of reduced gradients.
const plan::Piece& ShardedState::weights_for(const plan::Piece& reduced) const {
  for (const uint32_t w : weights_of_[reduced.param])
    if (const plan::Piece& weight = context_.plan.rank_plan.weights[w];
        weight.first <= reduced.first && reduced.first + reduced.count <= weight.first + weight.count)
      return weight;
  fail_internal(
      fmt::format("{} assigns reduced gradients of '{}' to a rank that has no weights for the same elements; this is a "
                  "bug in the plug-in",
                  context_.strategy.call_text("plan"), context_.plan.input.parameters[reduced.param].name));
}

// The part of a reduced-gradient piece whose states are `range`. `skip`: elements of the piece before this part.
update::UpdateSlice ShardedState::make_slice(const plan::Piece& reduced, const plan::Piece& weight, int64_t skip,
                                             const plan::StateRange& range) const {
  const std::vector<zr_view>& views = buffers_.views();
  update::UpdateSlice slice{};
  slice.param = reduced.param;
  slice.first = reduced.first + skip;
  slice.count = range.count;
  slice.weight = part_of(views[weight.buffer], weight.offset + slice.first - weight.first, range.count);
  slice.grad = part_of(views[reduced.buffer], reduced.offset + skip, range.count);
  slice.state_offset = range.first;
  slice.tier = range.tier;
  if (context_.plan.has_master_of(slice.param)) slice.master = states_.view(master_array(), range.first, range.count);
  for (std::size_t i = 0; i < context_.plan.input.description(reduced.param).slots.size(); ++i)
    slice.slots.push_back(states_.view(context_.plan.array_of(reduced.param, i), range.first, range.count));
  return slice;
}

// Makes one slice per part of a reduced-gradient piece whose states are on one tier.
void ShardedState::make_slices() {
  const plan::RankPlan& rank_plan = context_.plan.rank_plan;
  const std::size_t params = context_.plan.input.parameters.size();
  weights_of_ = ByParam(rank_plan.weights, params);
  for (std::size_t i = 0; i < rank_plan.reduced_gradients.size(); ++i) {
    const plan::Piece &reduced = rank_plan.reduced_gradients[i], &weight = weights_for(reduced);
    const int64_t offset = rank_plan.state_offset[i];
    for (const plan::StateRange& range : states_.ranges(offset, reduced.count)) {
      update::UpdateSlice slice = make_slice(reduced, weight, range.first - offset, range);
      if (states_.in_memory(range.tier)) (range.tier == 0 ? direct_ : staged_).push_back(slice);
      slices_.push_back(std::move(slice));
    }
  }
  slices_of_ = ByParam(slices_, params);
}

void ShardedState::bind_strategy() {
  CallError error;
  const auto bind = [&] { return context_.strategy.bind(buffers_.views(), context_.comm.ref(), &error); };
  context_.check(call_plugin(&error, bind), error, context_.strategy.call_text("bind"));
}

std::vector<const update::UpdateSlice*> ShardedState::bound_slices() const {
  std::vector<const update::UpdateSlice*> bound;
  for (const update::UpdateSlice& slice : slices_)
    for (const uint32_t w : weights_of_[slice.param])
      if (const plan::Piece& piece = context_.plan.rank_plan.weights[w];
          !piece.shard && piece.count == context_.plan.input.parameters[slice.param].count &&
          !buffers_.readers()[piece.buffer])
        bound.push_back(&slice);
  return bound;
}

offload::TierWaits ShardedState::waits() const {
  offload::TierWaits total = states_.waits();
  if (const offload::DiskBackedBuffers* disk_buffers = buffers_.disk_buffers()) {
    const offload::TierWaits waits = disk_buffers->waits();
    total.read += waits.read;
    total.write += waits.write;
  }
  return total;
}

std::optional<std::size_t> ShardedState::array_of(uint32_t param, LogicalTensor kind, const std::string& slot) const {
  if (kind == LogicalTensor::value && context_.plan.has_master_of(param)) return master_array();
  if (kind != LogicalTensor::state) return {};
  const std::vector<zr_slot>& slots = context_.plan.input.description(param).slots;
  std::string list;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slot == slots[i].name) {
      if (slots[i].shape != ZR_SLOT_LIKE_PARAM || slots[i].dtype != ZR_F32)
        fail_user(
            fmt::format("optimizer state '{}' cannot be accessed by name, because it is not an fp32 tensor of its "
                        "parameter's shape",
                        slot));
      return context_.plan.array_of(param, i);
    }
    list += (list.empty() ? "" : ", ") + std::string(slots[i].name);
  }
  const plan::PlanInput& input = context_.plan.input;
  fail_user(fmt::format("optimizer '{}' has no state '{}'{}; it has: {}",
                        context_.optimizers[input.parameters[param].optimizer].component().table->id, slot,
                        input.descriptions.size() > 1 ? fmt::format(" for '{}'", input.parameters[param].name) : "",
                        list.empty() ? "none" : list));
}

void ShardedState::visit_state(const update::UpdateSlice& slice, std::size_t array, int64_t first, int64_t count,
                               offload::OptimizerStates::Access access, const Visit& fn) {
  const int64_t skip = slice.state_offset - slice.first, end = first + count;
  // On the device a visit copies, so it is cut into parts, where the parameter may be cut.
  constexpr int64_t kPart = int64_t{4} << 20;  // elements
  while (first < end) {
    const int64_t part = round_up(kPart, context_.plan.input.cut_block(slice.param));
    const int64_t until = context_.device ? std::min(end, (first / part + 1) * part) : end;
    states_.visit(array, first + skip, until - first, access,
                  fmt::format("optimizer states of '{}'", context_.plan.input.parameters[slice.param].name),
                  [&](void* memory, int64_t at, int64_t n) { fn(memory, at - skip, n); });
    first = until;
  }
}

void ShardedState::visit_view(const zr_view& view, offload::OptimizerStates::Access access, uint32_t param,
                              const Visit& fn) {
  using Access = offload::OptimizerStates::Access;
  if (context_.device)
    return visit_on_host(*context_.device, view, {access != Access::write, access != Access::read}, fn);
  if (!disk_buffers() || !disk_buffers()->holds(view.data)) return fn(view.data, 0, view.count);
  disk_buffers()->visit(view, access,
                        fmt::format("weights or reduced gradients of '{}'", context_.plan.input.parameters[param].name),
                        fn);
}

zr_view ShardedState::weights_at(const plan::Piece& piece, int64_t first, int64_t count) const {
  const zr_dtype dtype = context_.plan.input.dtype_of(piece.param);
  char* const memory = static_cast<char*>(buffers_.memory()[piece.buffer]);
  return {memory + (piece.offset + first - piece.first) * size_of(dtype), count, dtype, 0, context_.memory_device()};
}

void ShardedState::edit_gradients(
    float factor, const std::vector<char>& touched,
    const std::function<void(uint32_t param, int64_t first, int64_t count, float* values)>& fn) {
  constexpr int64_t kPart = int64_t{64} << 10;  // elements per call, which bounds the memory for fp32 copies
  std::vector<float> copy;
  for (const update::UpdateSlice& slice : slices_) {
    if (!touched[slice.param]) continue;
    const zr_dtype dtype = slice.grad.dtype;
    visit_view(slice.grad, offload::OptimizerStates::Access::modify, slice.param,
               [&](void* memory, int64_t first, int64_t count) {
                 for (int64_t at = 0; at < count; at += kPart) {
                   const int64_t n = std::min(kPart, count - at);
                   void* const part = static_cast<char*>(memory) + at * size_of(dtype);
                   const bool finite =
                       update::count_non_finite({part, n, dtype, 0, {1, 0}}) == 0;  // otherwise the step is skipped
                   float* values = static_cast<float*>(part);
                   if (dtype != ZR_F32) {
                     copy.resize(static_cast<std::size_t>(n));
                     values = copy.data();
                     update::upcast(part, dtype, n, values);
                   }
                   for (int64_t i = 0; i < n; ++i) values[i] *= factor;
                   if (finite) fn(slice.param, slice.first + first + at, n, values);
                   if (dtype != ZR_F32) update::downcast(values, n, dtype, part);
                 }
               });
  }
}

void ShardedState::read(uint32_t param, LogicalTensor kind, const std::string& slot, int64_t first, int64_t count,
                        float* out) {
  const plan::MemoryPlan& plan = context_.plan;
  const plan::Parameter& parameter = plan.input.parameters[param];
  const auto array = array_of(param, kind, slot);
  for (const uint32_t u : slices_of_[param]) {
    const update::UpdateSlice& slice = slices_[u];
    const auto [from, n] = common(first, count, slice.first, slice.count);
    if (n == 0) continue;
    if (array) {
      visit_state(slice, *array, from, n, offload::OptimizerStates::Access::read,
                  [&](void* memory, int64_t at, int64_t some) {
                    std::memcpy(out + (at - first), memory, static_cast<std::size_t>(some) * 4);
                  });
      continue;
    }
    const zr_view view = part_of(kind == LogicalTensor::value ? slice.weight : slice.grad, from - slice.first, n);
    visit_view(view, offload::OptimizerStates::Access::read, param, [&](const void* memory, int64_t at, int64_t some) {
      update::upcast(memory, view.dtype, some, out + (from - first) + at);
    });
  }
  if (parameter.frozen)
    for (const uint32_t w : weights_of_[param]) {
      const plan::Piece& piece = plan.rank_plan.weights[w];
      const auto [from, n] = common(first, count, piece.first, piece.count);
      if (n == 0) continue;
      visit_view(weights_at(piece, from, n), offload::OptimizerStates::Access::read, param,
                 [&](const void* values, int64_t at, int64_t some) {
                   update::upcast(values, plan.input.dtype_of(param), some, out + (from - first) + at);
                 });
    }
  for (const plan::Segment& segment : plan.segments[param]) {
    const auto [from, n] = common(first, count, segment.first, segment.count);
    if (n == 0 || segment.owners.size() == static_cast<std::size_t>(context_.world())) continue;
    zr_coll broadcast{};
    broadcast.op = ZR_BROADCAST;
    broadcast.root = segment.owners.front();
    broadcast.src = broadcast.dst = {out + (from - first), n, ZR_F32, 0, {1, 0}};
    broadcast.label = parameter.name.c_str();
    context_.comm.run_control(broadcast);
  }
}

void ShardedState::write_state(uint32_t param, const std::string& slot, const float* values) {
  const auto array = array_of(param, LogicalTensor::state, slot);
  for (const uint32_t u : slices_of_[param])
    visit_state(slices_[u], *array, slices_[u].first, slices_[u].count, offload::OptimizerStates::Access::write,
                [&](void* memory, int64_t from, int64_t count) {
                  std::memcpy(memory, values + from, static_cast<std::size_t>(count) * 4);
                });
}

void ShardedState::own_weights(uint32_t param, offload::OptimizerStates::Access access,
                               const std::function<void(int64_t first, int64_t count, void* memory)>& fn) {
  for (const uint32_t w : weights_of_[param]) {
    const plan::Piece& piece = context_.plan.rank_plan.weights[w];
    if (!buffers_.readers()[piece.buffer]) {
      visit_view(weights_at(piece, piece.first, piece.count), access, param,
                 [&](void* values, int64_t at, int64_t some) { fn(piece.first + at, some, values); });
    } else {
      shared_weights(param,
                     [&](int64_t first, int64_t count) { fn(first, count, weights_at(piece, first, count).data); });
    }
  }
}

// What this rank writes of a parameter in memory that the ranks of its host share: the elements that it updates. The
// first rank of a host also writes those that no rank of the host updates.
void ShardedState::shared_weights(uint32_t param, const std::function<void(int64_t first, int64_t count)>& fn) const {
  const plan::PlanInput& input = context_.plan.input;
  const plan::PlanInput::RankLocation own = input.location_of(context_.rank());
  for (const uint32_t u : slices_of_[param]) fn(slices_[u].first, slices_[u].count);
  if (own.index != 0) return;
  const auto is_on_host = [&](int rank) { return input.location_of(rank).host == own.host; };
  for (const plan::Segment& segment : context_.plan.segments[param])
    if (input.parameters[param].frozen || std::ranges::none_of(segment.owners, is_on_host))
      fn(segment.first, segment.count);
}

void ShardedState::store(uint32_t param, const float* values) {
  for (const uint32_t u : slices_of_[param])
    if (context_.plan.has_master_of(param))
      visit_state(slices_[u], master_array(), slices_[u].first, slices_[u].count,
                  offload::OptimizerStates::Access::write, [&](void* memory, int64_t first, int64_t count) {
                    std::memcpy(memory, values + first, static_cast<std::size_t>(count) * 4);
                  });
  const auto access = offload::OptimizerStates::Access::write;
  own_weights(param, access, [&](int64_t first, int64_t count, void* memory) {
    update::downcast(values + first, count, context_.plan.input.dtype_of(param), memory);
  });
}

void ShardedState::store_full(uint32_t param, const void* full) {
  const zr_dtype dtype = context_.plan.input.dtype_of(param);
  std::vector<char> on_host;  // a part of `full`
  const auto at = [&](int64_t first, int64_t bytes) {
    const char* const values = static_cast<const char*>(full) + first * size_of(dtype);
    if (!context_.device) return values;
    on_host.resize(static_cast<std::size_t>(bytes));
    context_.device->download(values, on_host.data(), bytes);
    return static_cast<const char*>(on_host.data());
  };
  const auto access =
      context_.device ? offload::OptimizerStates::Access::modify : offload::OptimizerStates::Access::write;
  own_weights(param, access, [&](int64_t first, int64_t count, void* memory) {
    const auto bytes = static_cast<std::size_t>(count * size_of(dtype));
    const char* const values = at(first, count * size_of(dtype));
    if (std::memcmp(memory, values, bytes) == 0) return;  // for example after a zr::gather scope that only read
    std::memcpy(memory, values, bytes);
    stored_.insert(param);
  });
}

std::set<uint32_t> ShardedState::take_stored() { return std::exchange(stored_, {}); }

uint64_t ShardedState::hash_of_weights(const update::UpdateSlice& slice) {
  checkpoint::Hash hash;
  visit_view(
      slice.weight, offload::OptimizerStates::Access::read, slice.param,
      [&](const void* values, int64_t, int64_t count) { hash.add(values, count * size_of(slice.weight.dtype)); });
  return hash.value();
}

bool ShardedState::sync_master_from_weights(const update::UpdateSlice& slice) {
  if (!context_.plan.has_master_of(slice.param)) return false;
  const zr_dtype dtype = context_.plan.input.dtype_of(slice.param);
  bool changed = false;
  visit_view(slice.weight, offload::OptimizerStates::Access::read, slice.param,
             [&](const void* weights, int64_t at, int64_t some) {
               const int64_t begin = slice.first + at;
               visit_state(slice, master_array(), begin, some, offload::OptimizerStates::Access::modify,
                           [&](void* memory, int64_t first, int64_t count) {
                             changed |= update::sync_master_from_weights(
                                 static_cast<const char*>(weights) + (first - begin) * size_of(dtype), dtype, count,
                                 static_cast<float*>(memory));
                           });
             });
  return changed;
}

std::size_t ShardedState::array_of_kind(uint32_t param, const std::string& kind) const {
  const std::vector<zr_slot>& slots = context_.plan.input.description(param).slots;
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (kind == std::string("state.") + slots[i].name) return context_.plan.array_of(param, i);
  return master_array();
}

void ShardedState::visit_tensor(uint32_t param, const std::string& kind, int64_t first, int64_t count,
                                offload::OptimizerStates::Access access, const Visit& fn) {
  const plan::MemoryPlan& plan = context_.plan;
  int64_t at = first;
  const int64_t end = first + count;
  for (const uint32_t u : slices_of_[param]) {
    const update::UpdateSlice& slice = slices_[u];
    if (at >= end || at < slice.first || at >= slice.first + slice.count) continue;
    const int64_t n = std::min(end, slice.first + slice.count) - at;
    if (kind == "weight") {
      visit_view(part_of(slice.weight, at - slice.first, n), access, param,
                 [&](void* memory, int64_t first_of, int64_t some) { fn(memory, at + first_of, some); });
    } else {
      visit_state(slice, array_of_kind(param, kind), at, n, access, fn);
    }
    at += n;
  }
  for (const uint32_t w : weights_of_[param]) {
    const plan::Piece& piece = plan.rank_plan.weights[w];
    if (at >= end || at < piece.first || at >= piece.first + piece.count) continue;
    const int64_t n = std::min(end, piece.first + piece.count) - at;
    visit_view(weights_at(piece, at, n), access, param,
               [&](void* values, int64_t first_of, int64_t some) { fn(values, at + first_of, some); });
    at += n;
  }
  if (at < end)
    fail_internal(
        fmt::format("rank {} has no memory for elements {} to {} of '{}', although its plan assigns them to it",
                    context_.rank(), at, end - 1, plan.input.parameters[param].name));
}

const char* ShardedState::contiguous_address(uint32_t param, const std::string& kind, int64_t first, int64_t count) {
  if (context_.device) return nullptr;
  const char* address = nullptr;
  bool contiguous = true;
  for (const uint32_t u : slices_of_[param]) contiguous &= states_.in_memory(slices_[u].tier) || kind == "weight";
  if (disk_buffers() && kind == "weight")
    for (const uint32_t w : weights_of_[param])
      contiguous &= !disk_buffers()->holds(buffers_.memory()[context_.plan.rank_plan.weights[w].buffer]);
  if (!contiguous) return nullptr;
  visit_tensor(param, kind, first, count, offload::OptimizerStates::Access::read,
               [&](void* memory, int64_t, int64_t n) {
                 contiguous = n == count;
                 address = static_cast<const char*>(memory);
               });
  return contiguous ? address : nullptr;
}

const char* ShardedState::contiguous_on_device(uint32_t param, const std::string& kind, int64_t first,
                                               int64_t count) const {
  if (!context_.device) return nullptr;
  const void* address = nullptr;
  const auto contains = [&](int64_t from, int64_t n) { return from <= first && first + count <= from + n; };
  for (const uint32_t u : slices_of_[param]) {
    const update::UpdateSlice& slice = slices_[u];
    if (!contains(slice.first, slice.count)) continue;
    if (kind == "weight")
      address = part_of(slice.weight, first - slice.first, count).data;
    else if (slice.tier == 0)
      address = states_.view(array_of_kind(param, kind), first - slice.first + slice.state_offset, count).data;
  }
  if (context_.plan.input.parameters[param].frozen)
    for (const uint32_t w : weights_of_[param])
      if (const plan::Piece& piece = context_.plan.rank_plan.weights[w]; contains(piece.first, piece.count))
        address = weights_at(piece, first, count).data;
  return static_cast<const char*>(address);
}

void ShardedState::clear_states(uint32_t param) {
  const std::vector<zr_slot>& slots = context_.plan.input.description(param).slots;
  for (const uint32_t u : slices_of_[param])
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const plan::StateShape shape = plan::state_shape(context_.plan.input.parameters[param], slots[i]);
      visit_state(slices_[u], context_.plan.array_of(param, i), slices_[u].first, slices_[u].count,
                  offload::OptimizerStates::Access::write, [&](void* memory, int64_t first, int64_t n) {
                    const int64_t elements = shape.of(first + n) - shape.of(first);
                    std::memset(memory, 0, static_cast<std::size_t>(elements * size_of(slots[i].dtype)));
                  });
    }
}

// States on disk are read while states in memory are updated.
void ShardedState::for_each_slice_in_memory(
    const std::vector<char>& touched, const Updated& updated,
    const std::function<void(const std::vector<update::UpdateSlice>& slices)>& work) {
  const auto in_memory = [&](const std::vector<update::UpdateSlice>& slices) {
    disk_buffers() ? disk_buffers()->for_each_slice_in_memory(slices, touched, work) : work(slices);
  };
  const auto on_tier = [&](const std::vector<update::UpdateSlice>& slices) {
    device_updates_ ? device_updates_->for_each_slice_in_memory(slices, touched, work) : in_memory(slices);
  };
  in_memory(direct_);
  std::vector<update::UpdateSlice> staged;
  for (std::size_t i = 0; i < staged_.size(); ++i)
    if (updated.staged.empty() || !updated.staged[i]) staged.push_back(staged_[i]);
  on_tier(staged);
  states_.for_each_slice_in_memory(slices_, touched, updated.tiles, on_tier);
}

}  // namespace zr::host::state
