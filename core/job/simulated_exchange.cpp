#include "job/simulated_exchange.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "base/device_memory.hpp"
#include "base/dtype.hpp"
#include "base/error.hpp"
#include "job/optimizers.hpp"
#include "plan/local_gradients.hpp"

namespace zr::host::job {

namespace {

constexpr int64_t kUpdate = int64_t{1} << 60;  // after every warm-up

class Exchange {
 public:
  Exchange(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan,
           SimulatedMemory& memory)
      : input_(plan.input),
        rank_(plan.rank),
        local_(plan::local_plan(plan)),
        optimizers_(host, job),
        optimizer_(local_optimizer_of(plan.input, optimizers_)) {
    for (const plan::LocalArray& array : local_.arrays)
      memory_.push_back(memory.add(array.elements * size_of(array.dtype)));
  }

  void run(const zr_comm_ref& comm) {
    begin_step();
    const plugin::Instance& optimizer = *optimizer_.instance;
    if (optimizer_.api->bind)
      optimizer.call("bind", [&](zr_error* error) { return optimizer_.api->bind(optimizer.self(), comm, error); });
    add_gradients();
    std::vector<const zr_local_gradient*> list;
    for (const zr_local_gradient& gradient : gradients_) list.push_back(&gradient);
    const zr_step step{sizeof(zr_step), 1, kUpdate, std::numeric_limits<double>::quiet_NaN()};
    const zr_view scratch{memory_.back(), local_.arrays.back().elements, ZR_U8, 0, kHostMemory};
    optimizer.call("exchange", [&](zr_error* error) {
      return optimizer_.api->exchange(optimizer.self(), &step, list.data(), static_cast<uint32_t>(list.size()),
                                      &scratch, error);
    });
  }

 private:
  // All parameters have had an update with local gradients.
  void begin_step() {
    const std::vector<int64_t> all(input_.parameters.size(), kUpdate - 1), local(input_.parameters.size(), 1);
    const zr_param_updates before{sizeof(zr_param_updates), static_cast<uint32_t>(all.size()), all.data(),
                                  local.data()};
    uint32_t grads = ZR_GRADS_REDUCED;
    optimizer_.instance->call("gradients", [&](zr_error* error) {
      return optimizer_.api->gradients(optimizer_.instance->self(), kUpdate, &before, &grads, error);
    });
    if (grads != ZR_GRADS_LOCAL)
      fail_user(fmt::format("optimizer '{}' needs reduced gradients in update {} too",
                            optimizer_.instance->component().table->id, kUpdate));
  }

  void add_gradients() {
    const auto floats = [](void* data, int64_t first, int64_t count) {
      return zr_view{static_cast<float*>(data) + first, count, ZR_F32, 0, kHostMemory};
    };
    slots_.resize(input_.parameters.size());
    ranges_.resize(input_.parameters.size());
    for (uint32_t param = 0; param < input_.parameters.size(); ++param) {
      const plan::Parameter& p = input_.parameters[param];
      if (p.frozen || p.count == 0) continue;
      int64_t served = 0;
      for (const plan::ServedRange& range : local_.ranges[param]) {
        ranges_[param].push_back({range.first, range.count, range.rank, 0});
        if (range.rank == rank_) served += range.count;
      }
      const auto& private_slots = input_.description(param).private_slots;
      for (std::size_t i = 0; i < private_slots.size(); ++i)
        slots_[param].push_back(private_slots[i].flags & ZR_SLOT_UNSHARDED
                                    ? floats(memory_[1 + i], local_.offsets[param], p.count)
                                    : floats(memory_[1 + i], local_.served_offsets[param], served));
      gradients_.push_back({sizeof(zr_local_gradient), p.optimizer_group, p.name.c_str(), param, 0, p.count,
                            floats(memory_[0], local_.offsets[param], p.count), slots_[param].data(),
                            ranges_[param].data(), static_cast<uint32_t>(ranges_[param].size()), 0});
    }
  }

  const plan::PlanInput& input_;
  const int rank_;
  const plan::LocalPlan local_;
  std::vector<void*> memory_;  // by array of local_
  std::vector<std::vector<zr_view>> slots_;
  std::vector<std::vector<zr_served_range>> ranges_;
  std::vector<zr_local_gradient> gradients_;
  const Optimizers optimizers_;  // destroyed before the memory
  const LocalOptimizer optimizer_;
};

}  // namespace

void simulate_exchange(plugin::PluginHost& host, const plugin::ResolvedJob& job, const plan::MemoryPlan& plan,
                       const zr_comm_ref& comm, SimulatedMemory& memory) {
  Exchange(host, job, plan, memory).run(comm);
}

}  // namespace zr::host::job
