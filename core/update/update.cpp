#include "update/update.hpp"

#include <algorithm>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/round_up.hpp"
#include "update/cast.hpp"
#include "zr/ordered_reduce.hpp"

namespace zr::host::update {

namespace {
constexpr int64_t kSliceElements = 64 * plan::kNormBlock;
constexpr int64_t kCopiedSliceElements = 16 * plan::kNormBlock;  // copies of this size stay in a core's cache

struct UpdateRange {
  const UpdateSlice* slice;
  int64_t begin, count;
};

std::vector<UpdateRange> cut(const plan::PlanInput& plan, const std::vector<UpdateSlice>& slices,
                             const UpdateInput& input) {
  std::vector<UpdateRange> ranges;
  for (const UpdateSlice& slice : slices) {
    if (!(*input.touched)[slice.param]) continue;
    const bool copied = input.keeps_weights || slice.grad.dtype != ZR_F32;
    const int64_t size = round_up(copied ? kCopiedSliceElements : kSliceElements, plan.cut_block(slice.param));
    for (int64_t begin = 0; begin < slice.count; begin += size)
      ranges.push_back({&slice, begin, std::min(size, slice.count - begin)});
  }
  return ranges;
}

zr_view gradients_of(const UpdateRange& range) { return part_of(range.slice->grad, range.begin, range.count); }
zr_view weights_of(const UpdateRange& range) { return part_of(range.slice->weight, range.begin, range.count); }

// The range's gradients and weights as the optimizer reads and writes them: in place, or in the buffers that the caller
// passes.
struct Operands {
  Operands(const UpdateRange& range, bool keeps_weights, std::vector<float>& upcasted, std::vector<char>& new_weights)
      : grads(gradients_of(range)), weights(weights_of(range)) {
    if (grads.dtype != ZR_F32) {
      upcasted.resize(std::max(upcasted.size(), static_cast<std::size_t>(range.count)));
      upcast(grads.data, grads.dtype, grads.count, upcasted.data());
      grads = {upcasted.data(), grads.count, ZR_F32, 0, grads.device};
    }
    if (!keeps_weights) return;
    new_weights.resize(std::max(new_weights.size(), bytes()));
    const bool own_master = !range.slice->master.count;  // fp32 weights are their own master; others are only written
    if (own_master) std::memcpy(new_weights.data(), weights.data, bytes());
    weights.data = new_weights.data();
  }
  std::size_t bytes() const { return static_cast<std::size_t>(weights.count * size_of(weights.dtype)); }
  zr_view grads, weights;
};

// The range's part of a slot.
zr_view slot_of(const UpdateRange& range, const plan::MemoryPlan& plan, const zr_view& slot, std::size_t index) {
  if (slot.count == 0) return slot;  // of an element that another rank owns
  const plan::Parameter& parameter = plan.input.parameters[range.slice->param];
  const plan::StateShape shape = plan::state_shape(parameter, plan.input.description(range.slice->param).slots[index]);
  const int64_t begin = shape.of(range.begin);
  return part_of(slot, begin, shape.of(range.begin + range.count) - begin);
}

zr_update_slice describe(const UpdateRange& range, const plan::MemoryPlan& plan, const UpdateInput& input,
                         const Operands& operands, zr_view* slots) {
  const UpdateSlice& slice = *range.slice;
  const plan::Parameter& parameter = plan.input.parameters[slice.param];
  for (std::size_t i = 0; i < slice.slots.size(); ++i) slots[i] = slot_of(range, plan, slice.slots[i], i);
  return {sizeof(zr_update_slice),
          parameter.optimizer_group,
          parameter.name.c_str(),
          parameter.shape.data(),
          static_cast<int32_t>(parameter.shape.size()),
          slice.param,
          slice.first + range.begin,
          range.count,
          slice.first + range.begin,
          range.count,
          (*input.steps)[slice.param],
          (*input.rates)[slice.param],
          operands.weights,
          slice.master.count ? part_of(slice.master, range.begin, range.count) : slice.master,
          operands.grads,
          slots,
          input.keeps_weights ? uint32_t{ZR_SLICE_WEIGHT_COPY} : 0,
          0};
}

// Calls fn(slice) for every part of the touched slices, on the pool's threads.
template <class F>
void for_each_part(ThreadPool& pool, const plan::MemoryPlan& plan, const std::vector<UpdateSlice>& slices,
                   const UpdateInput& input, const F& fn) {
  const std::vector<UpdateRange> ranges = cut(plan.input, slices, input);
  pool.parallel_for(static_cast<int64_t>(ranges.size()), 1, [&](int64_t begin, int64_t end) {
    std::vector<zr_view> slots;
    std::vector<float> upcasted;
    std::vector<char> new_weights;
    for (int64_t i = begin; i < end; ++i) {
      const UpdateRange& range = ranges[static_cast<std::size_t>(i)];
      slots.resize(std::max(slots.size(), range.slice->slots.size()));
      const Operands operands(range, input.keeps_weights, upcasted, new_weights);
      fn(describe(range, plan, input, operands, slots.data()));
      if (input.keeps_weights) std::memcpy(gradients_of(range).data, operands.weights.data, operands.bytes());
    }
  });
}

// The sums for a part whose optimizer has passes.
zr_sums sums_of(const plan::PlanInput& plan, const SumAccess& sums, uint32_t param, uint32_t pass) {
  return {sizeof(zr_sums), pass, plan.cut_block(param), sums.totals(param), nullptr};
}
}  // namespace

UpdateSlice slice_part(const plan::MemoryPlan& plan, const UpdateSlice& slice, int64_t skip, int64_t count) {
  const UpdateRange range{&slice, skip, count};
  UpdateSlice part = slice;
  part.first += skip;
  part.state_offset += skip;
  part.count = count;
  for (zr_view* view : {&part.weight, &part.master, &part.grad})
    if (view->count > 0) *view = part_of(*view, skip, count);
  for (std::size_t i = 0; i < part.slots.size(); ++i) part.slots[i] = slot_of(range, plan, part.slots[i], i);
  return part;
}

void update(const std::vector<Optimizer>& optimizers, ThreadPool& pool, const plan::MemoryPlan& plan,
            const std::vector<UpdateSlice>& slices, const UpdateInput& input) {
  const zr_step step{sizeof(zr_step), input.grad_mul, input.step, input.grad_norm};
  for_each_part(pool, plan, slices, input, [&](const zr_update_slice& slice) {
    const Optimizer& optimizer = optimizers[plan.input.parameters[slice.param].optimizer];
    const auto passes = static_cast<uint32_t>(plan.input.description(slice.param).sums.size());
    void* const self = optimizer.instance->self();
    CallError error;
    const auto update = [&] {
      if (passes > 0) {
        const zr_sums sums = sums_of(plan.input, input.sums, slice.param, passes);
        return optimizer.partial_sums->update(self, &step, &slice, &sums, &error);
      }
      const zr_update_slice* pointer = &slice;
      return optimizer.instance->api<zr_optimizer_api>()->step(self, &step, &pointer, 1, nullptr, nullptr, &error);
    };
    check(call_plugin(&error, update), error, optimizer.instance->call_text(passes > 0 ? "update" : "step"));
  });
}

void update_on_device(const std::vector<Optimizer>& optimizers, DeviceMemory& device, const plan::MemoryPlan& plan,
                      const std::vector<UpdateSlice>& slices, const UpdateInput& input) {
  const zr_step step{sizeof(zr_step), input.grad_mul, input.step, input.grad_norm};
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    std::vector<zr_update_slice> updates;
    std::vector<const zr_update_slice*> pointers;
    for (const UpdateSlice& slice : slices) {
      const plan::Parameter& parameter = plan.input.parameters[slice.param];
      if (parameter.optimizer != i || !(*input.touched)[slice.param] || slice.count == 0) continue;
      updates.push_back({sizeof(zr_update_slice), parameter.optimizer_group, parameter.name.c_str(),
                         parameter.shape.data(), static_cast<int32_t>(parameter.shape.size()), slice.param, slice.first,
                         slice.count, slice.first, slice.count, (*input.steps)[slice.param],
                         (*input.rates)[slice.param], slice.weight, slice.master, slice.grad, slice.slots.data(), 0,
                         0});
    }
    if (updates.empty()) continue;
    for (const zr_update_slice& update : updates) pointers.push_back(&update);
    const plugin::Instance& optimizer = *optimizers[i].instance;
    CallError error;
    zr_code code = ZR_OK;
    device.run([&](zr_stream* stream) {
      code = call_plugin(&error, [&] {
        return optimizer.api<zr_optimizer_api>()->step(optimizer.self(), &step, pointers.data(),
                                                       static_cast<uint32_t>(pointers.size()), stream, nullptr, &error);
      });
    });
    check(code, error, optimizer.call_text("step"));
  }
}

void adopt_weights(ThreadPool& pool, const plan::MemoryPlan& plan, const std::vector<UpdateSlice>& slices,
                   const UpdateInput& input) {
  const std::vector<UpdateRange> ranges = cut(plan.input, slices, input);
  pool.parallel_for(static_cast<int64_t>(ranges.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const UpdateRange& range = ranges[static_cast<std::size_t>(i)];
      const zr_view weights = weights_of(range);
      copy_bytes(weights.data, gradients_of(range).data, weights.count * size_of(weights.dtype), true);
    }
  });
}

void add_up(const std::vector<Optimizer>& optimizers, ThreadPool& pool, const plan::MemoryPlan& plan,
            const std::vector<UpdateSlice>& slices, const UpdateInput& input, uint32_t pass) {
  const zr_step step{sizeof(zr_step), input.grad_mul, input.step, input.grad_norm};
  for_each_part(pool, plan, slices, input, [&](const zr_update_slice& slice) {
    const Optimizer& optimizer = optimizers[plan.input.parameters[slice.param].optimizer];
    zr_sums sums = sums_of(plan.input, input.sums, slice.param, pass);
    sums.partial = input.sums.partial(slice.param, slice.first);
    CallError error;
    const auto add_up = [&] {
      return optimizer.partial_sums->add_up(optimizer.instance->self(), &step, &slice, &sums, &error);
    };
    check(call_plugin(&error, add_up), error, optimizer.instance->call_text("add_up"));
  });
}

}  // namespace zr::host::update
