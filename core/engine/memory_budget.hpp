// Enforces memory.device_budget and memory.host_budget: a plan that exceeds one of them is rejected before the job
// starts; an allocation that exceeds one of them fails while the job runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "engine/budget.hpp"
#include "engine/step_context.hpp"
#include "engine/training_progress.hpp"

namespace zr::host::engine {

/// Throws UserError with the plan and suggested changes if the plan exceeds a budget. `communicator`: null for one
/// rank.
void check_budget(const Setup& setup, const plan::MemoryPlan& plan, const std::vector<plan::Parameter>& parameters,
                  const plugin::Instance* communicator);

/// While the object exists, limits device memory (the ledger plus libtorch's allocations) and host memory (the ledger).
/// Each change of the ledger is checked on the thread that makes it. Freeing memory never fails.
class MemoryBudget {
 public:
  /// Keeps references to all arguments. Throws UserError if a budget is already exceeded.
  MemoryBudget(const StepContext& context, const plugin::Instance* communicator, const TrainingProgress& progress);
  MemoryBudget(const MemoryBudget&) = delete;

  /// Throws UserError with the held bytes and suggested changes, because an allocation of `requested` bytes would
  /// exceed the device budget; 0: the held bytes already exceed it.
  [[noreturn]] void over_budget(int64_t requested) const;

 private:
  struct Watch {  // removes the limits in its destructor
    Ledger& ledger;
    model::Model& model;
    ~Watch();
  };
  void watch_host(int64_t budget, const plugin::Instance* communicator);
  void watch_device(int64_t budget);

  const StepContext& context_;
  const TrainingProgress& progress_;
  std::atomic<int64_t> host_held_{0}, device_held_{0};  // bytes at the last change
  const Watch watch_;
};

}  // namespace zr::host::engine
